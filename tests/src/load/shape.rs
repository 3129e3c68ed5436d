//! The default shape of an offered load: quiet, a sudden step, a climb, a plateau, and quiet again.
//!
//! Inputs: a seed, a length and a peak. Invariants: a pure function of these and the time; between
//! `0` and `1.1 × peak`; the same seed gives the same load; the last eighth stays below the load of
//! half a replica, so that an HPA with any sensible target ends at one.

use std::time::Duration;

use super::OfferedLoad;

/// A seeded day of load, squeezed into `length`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    seed: u64,
    length: Duration,
    peak: f64,
}

/// Corner points: share of the length, share of the peak. Straight lines between them; two points at
/// nearly one time make the step.
const CORNERS: [(f64, f64); 8] = [
    (0.00, 0.06),
    (STEP, 0.06),
    (STEP + 0.005, 0.36),
    (0.33, 0.42),
    (0.45, 1.00),
    (0.68, 1.00),
    (0.78, 0.06),
    (1.00, 0.05),
];

/// Where the step is, as a share of the length.
const STEP: f64 = 0.11;

/// Swing of the slow wave and of the noise, as shares of the momentary level.
const WAVE: f64 = 0.04;
const NOISE: f64 = 0.03;

/// Values of noise over the whole length; between them it is interpolated.
const NOISE_POINTS: f64 = 60.0;

impl Shape {
    /// A load that peaks near `peak` GPUs and lasts `length`.
    #[must_use]
    pub fn new(seed: u64, length: Duration, peak: f64) -> Self {
        Self {
            seed,
            length,
            peak: if peak.is_finite() { peak.max(0.0) } else { 0.0 },
        }
    }

    fn level(share: f64) -> f64 {
        let mut corners = CORNERS.iter().zip(CORNERS.iter().skip(1));
        corners
            .find(|(_, to)| share <= to.0)
            .map_or(CORNERS[CORNERS.len() - 1].1, |(from, to)| {
                let part = if to.0 > from.0 {
                    ((share - from.0) / (to.0 - from.0)).clamp(0.0, 1.0)
                } else {
                    1.0
                };
                from.1 + (to.1 - from.1) * part
            })
    }

    /// Value noise in −1..1, smooth over one [`NOISE_POINTS`]th of the length.
    fn noise(&self, share: f64) -> f64 {
        let position = share * NOISE_POINTS;
        let whole = position.floor();
        let part = position - whole;
        let smooth = part * part * (3.0 - 2.0 * part);
        // A share is within 0..1, so `whole` is a small non-negative number.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=60")]
        let index = whole as u64;
        let from = unit(self.seed, index);
        let to = unit(self.seed, index + 1);
        (from + (to - from) * smooth) * 2.0 - 1.0
    }
}

/// A number in 0..1 that looks random: splitmix64 of seed and index.
#[must_use]
pub(crate) fn unit(seed: u64, index: u64) -> f64 {
    let mut bits = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    // 53 bits fit an f64 without loss.
    #[expect(clippy::cast_precision_loss, reason = "only 53 bits are left")]
    let mantissa = (bits >> 11) as f64;
    mantissa / 9_007_199_254_740_992.0
}

impl OfferedLoad for Shape {
    fn gpus(&self, since_start: Duration) -> f64 {
        let share = (since_start.as_secs_f64() / self.length.as_secs_f64().max(0.001)).clamp(0.0, 1.0);
        let wave = (share * std::f64::consts::TAU * 7.0 + unit(self.seed, u64::MAX - 1) * 6.0).sin();
        let level = self.peak * Self::level(share);
        (level * (1.0 + WAVE * wave + NOISE * self.noise(share))).clamp(0.0, self.peak * 1.1)
    }

    fn length(&self) -> Duration {
        self.length
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LENGTH: Duration = Duration::from_secs(100);

    proptest! {
        #[test]
        fn load_is_finite_and_within_bounds(seed: u64, millis in 0_u64..200_000, peak in 0.0_f64..100.0) {
            let load = Shape::new(seed, LENGTH, peak).gpus(Duration::from_millis(millis));
            prop_assert!(load.is_finite() && (0.0..=peak * 1.1 + 1e-9).contains(&load));
        }

        #[test]
        fn a_seed_decides_everything(seed: u64, millis in 0_u64..100_000) {
            let at = Duration::from_millis(millis);
            let (one, two) = (Shape::new(seed, LENGTH, 4.0).gpus(at), Shape::new(seed, LENGTH, 4.0).gpus(at));
            prop_assert!((one - two).abs() < f64::EPSILON);
        }

        #[test]
        fn it_steps_up_peaks_and_ends_quiet(seed: u64) {
            let shape = Shape::new(seed, LENGTH, 4.0);
            let step = super::super::first_above(&shape, 1.0).unwrap();
            prop_assert!((11.0..11.6).contains(&step.as_secs_f64()), "{step:?}");
            let around = Duration::from_secs(1);
            let (before, after) = (shape.gpus(step.saturating_sub(around)), shape.gpus(step + around));
            prop_assert!(after > before * 4.0, "{before} then {after}");
            let plateau = shape.gpus(Duration::from_secs(55));
            prop_assert!(plateau > 3.6, "{plateau}");
            for second in 88..=110 {
                prop_assert!(shape.gpus(Duration::from_secs(second)) < 0.5);
            }
        }

        #[test]
        fn noise_is_smooth(seed: u64, millis in 15_000_u64..99_000) {
            let shape = Shape::new(seed, LENGTH, 4.0);
            let step = shape.gpus(Duration::from_millis(millis + 100)) - shape.gpus(Duration::from_millis(millis));
            prop_assert!(step.abs() < 0.25, "{step} GPUs within 100 ms");
        }
    }

    #[test]
    fn seeds_differ() {
        let at = Duration::from_secs(50);
        let distinct: std::collections::BTreeSet<_> = (0..50)
            .map(|seed| Shape::new(seed, LENGTH, 4.0).gpus(at).to_bits())
            .collect();
        assert!(distinct.len() > 45);
    }

    #[test]
    fn nonsense_peaks_are_no_load() {
        for peak in [f64::NAN, f64::INFINITY, -3.0] {
            assert!(Shape::new(1, LENGTH, peak).gpus(Duration::from_secs(50)).abs() < f64::EPSILON);
        }
    }
}
