//! Logits to a token: greedy, temperature, top-k, top-p, min-p, penalties, seed.
//!
//! The steps and their order are those of transformers: repetition penalty (Keskar et al. 2019),
//! then temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024).

use crate::error::{Error, Result};
use crate::kernels::Isa;
use crate::kernels::softmax::ExpSum;
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

/// What to sample with. `temperature == 0` is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerConfig {
    pub temperature: f32,
    /// The k most likely tokens; 0: all.
    pub top_k: usize,
    /// The fewest tokens whose probabilities reach p; 1: all.
    pub top_p: f32,
    /// Tokens at least so probable as min_p x the most likely one; 0: all.
    pub min_p: f32,
    /// Logits of tokens seen before are divided (if positive) or multiplied by it; 1: none.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that were generated before; 0: none.
    pub presence_penalty: f32,
    /// Taken once for every time that a token was generated before; 0: none.
    pub frequency_penalty: f32,
    pub seed: u64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl SamplerConfig {
    fn check(&self) -> Result<()> {
        let wrong = |what: &str, value: f32| Err(Error::argument(format!("{what}, not {value}")));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature must be 0 or more", self.temperature);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p must be above 0 and at most 1", self.top_p);
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return wrong("min_p must be 0 to 1", self.min_p);
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return wrong("repetition_penalty must be above 0", self.repetition_penalty);
        }
        for (name, value) in [
            ("presence_penalty must be -2 to 2", self.presence_penalty),
            ("frequency_penalty must be -2 to 2", self.frequency_penalty),
        ] {
            if !(-2.0..=2.0).contains(&value) {
                return wrong(name, value);
            }
        }
        Ok(())
    }
}

/// Samples the tokens of one sequence. The same seed and logits give the same tokens, on every
/// machine.
pub struct Sampler {
    config: SamplerConfig,
    isa: Isa,
    rng: ChaCha8Rng,
    /// `(token, times generated)` of every token of the prompt and the output, by token.
    seen: Vec<(u32, u32)>,
    /// `(logit, then probability, token)` of the tokens that are left; kept to allocate once.
    candidates: Vec<(f32, u32)>,
    /// Logits after biases, penalties and constraints.
    adjusted: Vec<f32>,
    weights: Vec<f32>,
    /// `(token, what is added to its logit)`
    bias: Vec<(u32, f32)>,
}

impl Sampler {
    /// `prompt` counts for the repetition penalty.
    ///
    /// # Errors
    /// `Argument`, naming the setting.
    pub fn new(config: SamplerConfig, prompt: &[u32], isa: Isa) -> Result<Self> {
        config.check()?;
        let mut seen: Vec<_> = prompt.iter().map(|&token| (token, 0)).collect();
        seen.sort_unstable();
        seen.dedup();
        Ok(Self {
            config,
            isa,
            rng: ChaCha8Rng::seed_from_u64(config.seed),
            seen,
            candidates: Vec::new(),
            adjusted: Vec::new(),
            weights: Vec::new(),
            bias: Vec::new(),
        })
    }

    /// Adds to the logits of tokens, before everything else.
    pub fn with_bias(self, bias: Vec<(u32, f32)>) -> Self {
        Self { bias, ..self }
    }

    /// Chooses the next token from `[vocab_size]` logits and remembers it.
    ///
    /// # Errors
    /// `Argument` if there are no logits.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        self.sample_allowed(logits, None)
    }

    /// [`Sampler::sample`], of the tokens whose bits are set alone: bit `t mod 32` of word `t / 32`.
    ///
    /// # Errors
    /// `Argument` if there are no logits, or no token is allowed.
    pub fn sample_allowed(&mut self, logits: &[f32], allowed: Option<&[u32]>) -> Result<u32> {
        if logits.is_empty() {
            return Err(Error::argument("there are no logits to sample from"));
        }
        let config = self.config;
        let penalties = config.repetition_penalty != 1.0
            || config.presence_penalty != 0.0
            || config.frequency_penalty != 0.0;
        let token = if penalties || !self.bias.is_empty() || allowed.is_some() {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            for &(token, bias) in &self.bias {
                if let Some(logit) = adjusted.get_mut(token as usize) {
                    *logit += bias;
                }
            }
            if penalties {
                self.penalize(&mut adjusted);
            }
            let left = allowed.is_none_or(|allowed| forbid_others(&mut adjusted, allowed));
            let token = left.then(|| self.choose(&adjusted));
            self.adjusted = adjusted;
            token.ok_or_else(|| Error::argument("the constraint allows no token"))?
        } else {
            self.choose(logits)
        };
        match self.seen.binary_search_by_key(&token, |&(token, _)| token) {
            Ok(i) => self.seen[i].1 += 1,
            Err(i) => self.seen.insert(i, (token, 1)),
        }
        Ok(token)
    }

    fn penalize(&self, logits: &mut [f32]) {
        let config = &self.config;
        for &(token, times) in &self.seen {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            let penalty = config.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            if times > 0 {
                *logit -= config.presence_penalty + config.frequency_penalty * times as f32;
            }
        }
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let config = self.config;
        if config.temperature == 0.0 || config.top_k == 1 {
            return argmax(logits);
        }
        self.keep_top_k(logits);
        // Probabilities, up to a common factor.
        let candidates = &mut self.candidates;
        let weights = &mut self.weights;
        weights.clear();
        weights.extend(candidates.iter().map(|c| c.0 / config.temperature));
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = f64::from(self.isa.run(ExpSum { x: weights, largest }));
        for (candidate, &weight) in candidates.iter_mut().zip(&*weights) {
            candidate.0 = weight;
        }
        // 53 random bits: a number of [0, 1).
        let random = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let kept = if config.top_p < 1.0 || config.min_p > 0.0 {
            let mass = if config.top_p < 1.0 { total * f64::from(config.top_p) } else { f64::INFINITY };
            keep_likeliest(candidates, mass, config.min_p)
        } else {
            &candidates[..]
        };
        let mass: f64 = kept.iter().map(|&(weight, _)| f64::from(weight)).sum();
        let mut left = random * mass;
        for &(weight, token) in kept {
            left -= f64::from(weight);
            if left < 0.0 {
                return token;
            }
        }
        argmax(logits) // rounding left a crumb, or no logit was a number
    }

    /// Fills `candidates` with the `top_k` largest logits: all in order of tokens, or a part from the
    /// largest on.
    fn keep_top_k(&mut self, logits: &[f32]) {
        let k = match self.config.top_k {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        let candidates = &mut self.candidates;
        let all = logits.iter().zip(0u32..).map(|(&logit, token)| (logit, token));
        candidates.clear();
        if k == logits.len() {
            candidates.extend(all);
            return;
        }
        // Up to 2k, cut back to the best k when full: most logits fail the first comparison.
        let mut least = f32::NEG_INFINITY;
        for (logit, token) in all {
            if logit < least {
                continue;
            }
            candidates.push((logit, token));
            if candidates.len() == 2 * k {
                candidates.select_nth_unstable_by(k - 1, likeliest_first);
                candidates.truncate(k);
                least = candidates[k - 1].0;
            }
        }
        candidates.sort_unstable_by(likeliest_first);
        candidates.truncate(k);
    }
}

/// Likeliest first; of equals, the lower token: one order on every machine.
fn likeliest_first(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The fewest of the likeliest whose weights reach `mass`, and of these the ones with at least
/// `min_p` times the largest weight. Sorts no more than it must.
fn keep_likeliest(candidates: &mut [(f32, u32)], mass: f64, min_p: f32) -> &[(f32, u32)] {
    let mut sorted = 64;
    loop {
        let whole = sorted >= candidates.len();
        if !whole {
            candidates.select_nth_unstable_by(sorted, likeliest_first);
        }
        let len = sorted.min(candidates.len());
        let head = &mut candidates[..len];
        head.sort_unstable_by(likeliest_first);
        let least = head[0].0 * min_p;
        let mut sum = 0.0;
        let end = head.iter().position(|&(weight, _)| {
            let enough = sum >= mass || weight < least;
            sum += f64::from(weight);
            enough
        });
        match end {
            Some(end) => return &candidates[..end.max(1)],
            None if whole => return candidates,
            None => sorted *= 8,
        }
    }
}

/// Logits of tokens whose bits are not set become -infinity; whether any is left.
fn forbid_others(logits: &mut [f32], allowed: &[u32]) -> bool {
    let mut left = false;
    for (token, logit) in logits.iter_mut().enumerate() {
        if allowed.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1) {
            left = true;
        } else {
            *logit = f32::NEG_INFINITY;
        }
    }
    left
}

/// Natural log probabilities of `token` and of the `count` likeliest, likeliest first; of equals the lower
/// token. They are of the logits themselves: no temperature, no filter, no penalty.
pub fn log_probabilities(logits: &[f32], token: u32, count: usize) -> Vec<(u32, f64)> {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    // One order of summation, and one `exp`, on every machine.
    let sum: f64 = logits.iter().map(|&logit| libm::exp(f64::from(logit) - largest)).sum();
    let log_sum = libm::log(sum);
    let all = logits.iter().zip(0u32..).map(|(&logit, token)| (logit, token));
    let mut likeliest: Vec<_> = if count == 0 { Vec::new() } else { all.collect() };
    let count = count.min(likeliest.len());
    if count > 0 && count < likeliest.len() {
        likeliest.select_nth_unstable_by(count - 1, likeliest_first);
    }
    likeliest.truncate(count);
    if !likeliest.iter().any(|&(_, known)| known == token)
        && let Some(&logit) = logits.get(token as usize)
    {
        likeliest.push((logit, token));
    }
    likeliest.sort_unstable_by(likeliest_first);
    likeliest.into_iter().map(|(logit, token)| (token, f64::from(logit) - largest - log_sum)).collect()
}

/// The token with the largest logit; of equals, the first.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    best as u32
}
