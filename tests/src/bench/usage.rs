//! What a process uses: CPU time and resident memory, from `/proc`; and quantiles of what was measured.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// CPU time of a process so far, all its threads, ended ones included.
///
/// # Errors
/// The process is gone, or `/proc` has another shape.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let ticks = ticks(&stat).with_context(|| format!("{path}: {stat:?}"))?;
    // The kernel's USER_HZ, fixed at 100 in the interface on every architecture Rust runs Linux on.
    Ok(Duration::from_millis(ticks * 10))
}

/// User and system ticks of a `stat` line: fields 14 and 15, counted after the name, which may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Resident memory of a process, bytes: every page it maps, shared ones in full.
///
/// # Errors
/// The process is gone, or `/proc` has another shape.
pub fn resident(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("Rss:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse::<u64>().ok())
        .with_context(|| format!("no Rss in {path}"))?;
    Ok(kib * 1024)
}

/// CPU use over a span, in thousandths of a core.
#[derive(Debug)]
pub struct CpuMeter {
    pid: u32,
    begun: Instant,
    used: Duration,
}

impl CpuMeter {
    /// Starts measuring.
    ///
    /// # Errors
    /// As [`cpu_time`].
    pub fn start(pid: u32) -> Result<Self> {
        Ok(Self {
            pid,
            used: cpu_time(pid)?,
            begun: Instant::now(),
        })
    }

    /// Mean use since the start.
    ///
    /// # Errors
    /// As [`cpu_time`].
    pub fn millicores(&self) -> Result<f64> {
        let used = cpu_time(self.pid)?.saturating_sub(self.used);
        Ok(used.as_secs_f64() / self.begun.elapsed().as_secs_f64() * 1000.0)
    }
}

/// The `q`-quantile by nearest rank; none of nothing.
#[must_use]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "counts of measurements are far below 2^52"
)]
pub fn quantile(values: &[Duration], q: f64) -> Option<Duration> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (q * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_counted_after_a_name_with_brackets() {
        let stat = "42 (a) b) S 1 2 3 4 5 6 7 8 9 10 700 31 0 0 20 0 4 0 99";
        assert_eq!(ticks(stat), Some(731));
        assert_eq!(ticks("42 (cut"), None);
    }

    #[test]
    fn our_own_use_is_read() {
        let pid = std::process::id();
        assert!(resident(pid).unwrap() > 1 << 20);
        let meter = CpuMeter::start(pid).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(120) {
            std::hint::black_box(0);
        }
        assert!(meter.millicores().unwrap() > 10.0);
    }

    #[test]
    fn quantiles_are_nearest_rank() {
        let values: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(quantile(&values, 0.99), Some(Duration::from_millis(198)));
        assert_eq!(quantile(&values[..1], 0.5), Some(Duration::from_millis(1)));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
