//! The safetensors files of a checkpoint directory.
//!
//! Headers are read when the directory is opened, tensors by positioned reads when they are packed. A
//! memory map would save a copy, but a file that is cut short meanwhile kills the process then; here it is
//! an error like any other.

use super::{TensorSource, read_json, regular_file};
use crate::error::{Error, Result};
use crate::tensor::{StoredBytes, StoredDtype, StoredTensor, try_resize};
use safetensors::tensor::{Dtype, Metadata};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// The format's own limit.
const LARGEST_HEADER: u64 = 100_000_000;

/// The weight files of a checkpoint directory as `save_pretrained` writes it.
pub struct Checkpoint {
    files: Vec<WeightFile>,
    holders: HashMap<String, Holder>,
}

/// Which file holds a tensor.
#[derive(Clone, Copy)]
enum Holder {
    File(usize),
    /// Two files do, and the index does not say which counts.
    Several(usize, usize),
}

struct WeightFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Where the tensors' bytes start.
    data: u64,
}

impl Checkpoint {
    /// Reads the headers of all weight files: those that the index names if there is one, else the single
    /// file. An index says, tensor by tensor, which file counts.
    ///
    /// # Errors
    /// `File` for what cannot be read, `Model` for what is wrong; both name the file.
    pub fn open(directory: &Path) -> Result<Self> {
        let index_path = directory.join(INDEX);
        let weight_map = match index_path.exists() {
            true => read_index(&index_path)?,
            false => BTreeMap::new(),
        };
        let shards: BTreeSet<_> = weight_map.values().map(String::as_str).collect();
        if !shards.is_empty() && !shards.contains(SINGLE) && directory.join(SINGLE).exists() {
            return Err(Error::model(format!(
                "{}: there are both {SINGLE} and {INDEX}, which does not name it; delete {INDEX} to load the \
                 single file, which is what transformers does, or delete {SINGLE} to load the files that the \
                 index names",
                directory.display()
            )));
        }
        let shards = if shards.is_empty() { BTreeSet::from([SINGLE]) } else { shards };
        let files =
            shards.iter().map(|name| WeightFile::open(directory.join(name))).collect::<Result<Vec<_>>>()?;
        let mut holders = HashMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.metadata.tensors().into_keys() {
                match holders.entry(name) {
                    Entry::Vacant(entry) => {
                        entry.insert(Holder::File(i));
                    }
                    Entry::Occupied(mut entry) => {
                        let (Holder::File(first) | Holder::Several(first, _)) = *entry.get();
                        entry.insert(Holder::Several(first, i));
                    }
                }
            }
        }
        let numbers: HashMap<_, _> = shards.iter().enumerate().map(|(i, &shard)| (shard, i)).collect();
        for (name, shard) in &weight_map {
            let i = numbers[shard.as_str()];
            if files[i].metadata.info(name).is_none() {
                return Err(Error::model(format!(
                    "{}: {name} is not in {}, where {INDEX} says it is",
                    directory.display(),
                    files[i].path.display()
                )));
            }
            holders.insert(name.clone(), Holder::File(i));
        }
        Ok(Self { files, holders })
    }
}

/// Which file the index says holds a tensor.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: Option<BTreeMap<String, serde_json::Value>>,
    }
    let wrong = |what: String| Error::model(format!("{}: {what}", path.display()));
    let index: Index =
        serde_json::from_str(&read_json(path)?).map_err(|e| wrong(format!("not a valid index: {e}")))?;
    let map = index.weight_map.ok_or_else(|| wrong("weight_map is missing".into()))?;
    if map.is_empty() {
        return Err(wrong("weight_map is empty".into()));
    }
    map.into_iter()
        .map(|(tensor, file)| match file {
            // A plain name: an index must not reach out of its directory.
            serde_json::Value::String(name)
                if !name.is_empty() && Path::new(&name).file_name() == Some(name.as_ref()) =>
            {
                Ok((tensor, name))
            }
            file => Err(wrong(format!("{tensor}: {file} is not a file name"))),
        })
        .collect()
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self> {
        regular_file(&path)?;
        let failed = |e| Error::file(&path, e);
        let broken = |what: &dyn std::fmt::Display| {
            Error::model(format!("{}: not a whole safetensors file: {what}", path.display()))
        };
        let file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        if size < 8 {
            return Err(broken(&"the header is too small"));
        }
        let mut length = [0; 8];
        read_exact_at(&file, &mut length, 0).map_err(failed)?;
        let length = u64::from_le_bytes(length);
        let data = match length.checked_add(8) {
            Some(data) if data <= size && length <= LARGEST_HEADER => data,
            _ => return Err(broken(&format_args!("its header is said to have {length} bytes"))),
        };
        let mut header = Vec::new();
        try_resize(&mut header, length as usize)?;
        read_exact_at(&file, &mut header, 8).map_err(failed)?;
        // Parsing checks that the tensors lie side by side and have the sizes of their shapes.
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| broken(&e))?;
        let expected = data.checked_add(metadata.data_len() as u64);
        if expected != Some(size) {
            return Err(broken(&format_args!(
                "it has {size} bytes, {} are expected",
                expected.unwrap_or(u64::MAX)
            )));
        }
        Ok(Self { path, file, metadata, data })
    }
}

/// Fills `buffer` with the bytes from `offset` on.
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    use std::os::unix::fs::FileExt;
    #[cfg(windows)]
    use std::os::windows::fs::FileExt;
    while !buffer.is_empty() {
        #[cfg(unix)]
        let read = file.read_at(buffer, offset);
        #[cfg(windows)]
        let read = file.seek_read(buffer, offset);
        match read {
            Ok(0) => {
                let what = "the file was cut short while it was read";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
            Ok(n) => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl StoredBytes for WeightFile {
    fn read<'b>(&'b self, range: Range<u64>, buffer: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        let bytes = (range.end - range.start) as usize;
        if buffer.len() < bytes {
            try_resize(buffer, bytes)?;
        }
        let buffer = &mut buffer[..bytes];
        read_exact_at(&self.file, buffer, self.data + range.start).map_err(|e| Error::file(&self.path, e))?;
        Ok(buffer)
    }

    fn origin(&self) -> String {
        self.path.display().to_string()
    }
}

impl TensorSource for Checkpoint {
    fn tensor<'a>(&'a self, name: &'a str, shape: &[usize]) -> Result<StoredTensor<'a>> {
        let file = match self.holders.get(name) {
            Some(&Holder::File(i)) => &self.files[i],
            Some(&Holder::Several(a, b)) => {
                return Err(Error::model(format!(
                    "{} and {} both hold {name}, and {INDEX} does not say which counts",
                    self.files[a].path.display(),
                    self.files[b].path.display()
                )));
            }
            None => {
                let paths: Vec<_> = self.files.iter().map(WeightFile::origin).collect();
                return Err(Error::model(format!("{}: tensor {name} is missing", paths.join(", "))));
            }
        };
        let wrong = |what: String| Error::model(format!("{}: {name} {what}", file.path.display()));
        let info = file.metadata.info(name).ok_or_else(|| wrong("is missing".into()))?;
        if info.shape != shape {
            return Err(wrong(format!("has shape {:?}, expected {shape:?}", info.shape)));
        }
        let dtype = match info.dtype {
            Dtype::F32 => StoredDtype::F32,
            Dtype::F16 => StoredDtype::F16,
            Dtype::BF16 => StoredDtype::Bf16,
            other => return Err(wrong(format!("has dtype {other:?}; F32, F16 and BF16 are supported"))),
        };
        let cols = shape[shape.len() - 1];
        let rows = if shape.len() == 1 { 1 } else { shape[0] };
        Ok(StoredTensor { name, dtype, rows, cols, bytes: file, start: info.data_offsets.0 as u64 })
    }
}
