//! Rotary position embedding (Su et al. 2021): cosines and sines of a position.

/// The frequencies of a model's heads. Angles are computed in f64, by a library that gives the same
/// bits on every machine, and stored as f32.
pub struct Rope {
    frequencies: Vec<f64>, // [head_dim / 2]: theta^(-2i / head_dim)
}

impl Rope {
    pub fn new(theta: f64, head_dim: usize) -> Self {
        let frequency = |i: usize| libm::pow(theta, -((2 * i) as f64) / head_dim as f64);
        Self { frequencies: (0..head_dim / 2).map(frequency).collect() }
    }

    /// `[head_dim]`: the cosines, then the sines.
    pub fn rotation(&self, position: usize, out: &mut [f32]) {
        let (cosines, sines) = out.split_at_mut(self.frequencies.len());
        for ((frequency, cos), sin) in self.frequencies.iter().zip(cosines).zip(sines) {
            let (s, c) = libm::sincos(position as f64 * frequency);
            *cos = c as f32;
            *sin = s as f32;
        }
    }
}
