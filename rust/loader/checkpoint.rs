//! The safetensors files of a checkpoint directory, memory-mapped.
#![allow(unsafe_code)] // the memory map: see the two blocks

use super::TensorSource;
use crate::error::{Error, Result};
use crate::linear::RowSource;
use crate::model::Config;
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// A config or index of this size is not one.
const LARGEST_JSON: u64 = 64 << 20;

/// A checkpoint directory as `save_pretrained` writes it.
pub struct Checkpoint {
    config: Config,
    files: Vec<WeightFile>,
    /// Which file holds a tensor.
    names: HashMap<String, usize>,
}

struct WeightFile {
    path: PathBuf,
    map: Mmap,
    /// Where the tensors' bytes start.
    data: usize,
    metadata: Metadata,
}

impl Checkpoint {
    /// Reads `config.json` and the headers of all weight files: those that the index names if there
    /// is one, else the single file.
    ///
    /// # Errors
    /// `File` for what cannot be read, `Model` for what is wrong; both name the file.
    pub fn open(directory: &Path) -> Result<Self> {
        let config_path = directory.join("config.json");
        let config = Config::from_json(&read_json(&config_path)?).map_err(|e| in_directory(directory, e))?;
        let index_path = directory.join(INDEX);
        let shards =
            if index_path.exists() { read_index(&index_path)? } else { BTreeSet::from([SINGLE.to_owned()]) };
        let files =
            shards.iter().map(|name| WeightFile::open(directory.join(name))).collect::<Result<Vec<_>>>()?;
        let mut names = HashMap::new();
        for (i, file) in files.iter().enumerate() {
            names.extend(file.metadata.tensors().into_keys().map(|name| (name, i)));
        }
        Ok(Self { config, files, names })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }
}

fn in_directory(directory: &Path, error: Error) -> Error {
    match error {
        Error::Model(what) => Error::model(format!("{}: {what}", directory.display())),
        other => other,
    }
}

/// The size of a file that is one: a pipe would be waited for, a device never ends.
fn regular_file(path: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(path).map_err(|e| Error::file(path, e))?;
    if !metadata.is_file() {
        return Err(Error::model(format!("{}: not a file", path.display())));
    }
    Ok(metadata.len())
}

fn read_json(path: &Path) -> Result<String> {
    let failed = |e| Error::file(path, e);
    let size = regular_file(path)?;
    if size > LARGEST_JSON {
        return Err(Error::model(format!("{}: too large ({size} bytes)", path.display())));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    String::from_utf8(bytes).map_err(|_| Error::model(format!("{}: not valid UTF-8", path.display())))
}

/// The files that an index names.
fn read_index(path: &Path) -> Result<BTreeSet<String>> {
    let wrong = |what: String| Error::model(format!("{}: {what}", path.display()));
    let index: serde_json::Value =
        serde_json::from_str(&read_json(path)?).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| wrong("weight_map is missing".into()))?;
    let mut files = BTreeSet::new();
    for (tensor, file) in map {
        let name = file.as_str().unwrap_or_default();
        // A plain name: an index must not reach out of its directory.
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(wrong(format!("{tensor}: {file} is not a file name")));
        }
        files.insert(name.to_owned());
    }
    if files.is_empty() {
        return Err(wrong("weight_map is empty".into()));
    }
    Ok(files)
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self> {
        regular_file(&path)?;
        let file = File::open(&path).map_err(|e| Error::file(&path, e))?;
        // SAFETY: the map is read-only and lives while the model loads. As with every memory map, the
        // file must not be cut short by someone else meanwhile.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::file(&path, e))?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| Error::model(format!("{}: not a whole safetensors file: {e}", path.display())))?;
        Ok(Self { path, data: header + 8, map, metadata })
    }
}

impl TensorSource for Checkpoint {
    fn tensor(&self, name: &str, rows: Option<usize>, cols: usize) -> Result<RowSource<'_>> {
        let file = self.names.get(name).map(|&i| &self.files[i]);
        let found = file.and_then(|file| Some((file, file.metadata.info(name)?)));
        let Some((file, info)) = found else {
            let paths: Vec<_> = self.files.iter().map(|f| f.path.display().to_string()).collect();
            return Err(Error::model(format!("{}: tensor {name} is missing", paths.join(", "))));
        };
        let wrong = |what: String| Error::model(format!("{}: {name} {what}", file.path.display()));
        let expected: Vec<usize> = rows.into_iter().chain([cols]).collect();
        if info.shape != expected {
            return Err(wrong(format!("has shape {:?}, expected {expected:?}", info.shape)));
        }
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(wrong(format!("has dtype {:?}; F32, F16 and BF16 are supported", info.dtype)));
        }
        let (start, end) = info.data_offsets;
        let rows = rows.unwrap_or(1);
        let bytes = &file.map[file.data..][start..end];
        Ok(RowSource { bytes, dtype: info.dtype, rows, cols })
    }

    fn release(&self, bytes: &[u8]) {
        let start = bytes.as_ptr() as usize;
        for file in &self.files {
            let map = file.map.as_ptr() as usize;
            if (map..map + file.map.len()).contains(&start) {
                // SAFETY: the pages of a read-only file map come back from the file when they are
                // read again. This is only advice, so a refusal is nothing to report.
                let _ = unsafe {
                    file.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start - map, bytes.len())
                };
            }
        }
    }
}
