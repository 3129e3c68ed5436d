//! What the demo can be asked for: raw arguments, then the resolved request.
//!
//! Invariants: all bad settings are reported together; reading arguments touches nothing but the trace file.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::load::OfferedLoad;
use crate::load::shape::Shape;
use crate::load::trace::{Columns, Trace};

/// Watch a GPU's load travel through exporter, adapter, a real kube-apiserver and the real HPA controller
/// into new replicas.
#[derive(Debug, Clone, Parser)]
#[command(name = "forewarm-demo", version)]
pub struct Args {
    /// `real`: everything on a real control plane. `none`: exporter and adapter only, in seconds
    #[arg(long, env = "CONTROL_PLANE", default_value = "real")]
    control_plane: ControlPlaneKind,
    /// `fake`: simulated GPUs. `real`: this machine's driver, read by exporter and adapter only
    #[arg(long, env = "NVML", default_value = "fake")]
    nvml: NvmlKind,
    /// Stay up after the story and print a KUBECONFIG that works from other shells
    #[arg(long, env = "FOREWARM_DEMO_HOLD")]
    hold: bool,
    /// Replay this CSV file as offered load instead of the built-in shape
    #[arg(long, env = "FOREWARM_DEMO_TRACE", value_name = "FILE", requires = "column")]
    trace: Option<PathBuf>,
    /// Time column of the trace
    #[arg(
        long,
        env = "FOREWARM_DEMO_TIME",
        value_name = "NAME",
        default_value = "time",
        requires = "trace"
    )]
    time: String,
    /// Value column of the trace
    #[arg(long, env = "FOREWARM_DEMO_COLUMN", value_name = "NAME", requires = "trace")]
    column: Option<String>,
    /// Add up rows of the trace that have one time
    #[arg(long, env = "FOREWARM_DEMO_SUM_BY_TIME", requires = "trace")]
    sum_by_time: bool,
    /// Factor from the trace's unit to GPUs
    #[arg(
        long,
        env = "FOREWARM_DEMO_SCALE",
        value_name = "FACTOR",
        requires = "trace",
        allow_negative_numbers = true,
        default_value_t = 1.0
    )]
    scale: f64,
    /// Recorded seconds in each second of replay
    #[arg(
        long,
        env = "FOREWARM_DEMO_SPEED",
        value_name = "FACTOR",
        requires = "trace",
        allow_negative_numbers = true,
        default_value_t = 1.0
    )]
    speed: f64,
    /// Seed of the built-in shape and of loading times
    #[arg(long, env = "FOREWARM_DEMO_SEED", value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Seconds of offered load; a longer trace is cut off
    #[arg(long, env = "FOREWARM_DEMO_DURATION", value_name = "SECONDS")]
    duration: Option<u64>,
    /// Peak of the built-in shape, GPUs
    #[arg(
        long,
        env = "FOREWARM_DEMO_PEAK",
        value_name = "GPUS",
        allow_negative_numbers = true,
        default_value_t = 4.3
    )]
    peak: f64,
    /// Seconds that a replica takes to load its weights
    #[arg(
        long,
        env = "FOREWARM_DEMO_LOADING",
        value_name = "SECONDS",
        allow_negative_numbers = true,
        default_value_t = 6.0
    )]
    loading: f64,
    /// Port of the local page; 0 takes a free one
    #[arg(
        long,
        env = "FOREWARM_DEMO_PAGE_PORT",
        value_name = "PORT",
        default_value_t = 0
    )]
    page_port: u16,
    /// Show the standalone half until the control plane is built, then end (used by the demo itself)
    #[arg(long, hide = true)]
    while_building: bool,
}

/// How much of a cluster the demo has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ControlPlaneKind {
    Real,
    None,
}

/// Where GPU readings come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NvmlKind {
    Fake,
    Real,
}

/// What is to be shown.
#[derive(Clone)]
pub struct Request {
    /// The offered load.
    pub load: Arc<dyn OfferedLoad>,
    /// What it is, for people.
    pub load_name: String,
    /// Time a replica loads.
    pub loading: Duration,
    /// Seed of loading times.
    pub seed: u64,
    /// Exporter and adapter only.
    pub standalone: bool,
    /// Read the machine's driver.
    pub real_nvml: bool,
    /// End once the control plane is built.
    pub while_building: bool,
    /// Stay up afterwards.
    pub hold: bool,
    /// Port of the page.
    pub page_port: u16,
    /// How long the standalone half runs.
    pub standalone_for: Duration,
}

/// Default length of the built-in shape.
const SHAPE: Duration = Duration::from_secs(80);

/// Shortest built-in shape, seconds.
const SHORTEST: u64 = 20;

/// Peaks of the built-in shape, GPUs.
const PEAK: RangeInclusive<f64> = 2.0..=14.0;
const PEAK_WHY: &str = "the second act needs three replicas, and 24 GPUs at the HPA's aim take no more";

/// Loading times, seconds.
const LOADING: RangeInclusive<f64> = 5.0..=600.0;
const LOADING_WHY: &str = "the HPA must look at least once while a replica loads";

/// How long the standalone half is worth watching.
const STANDALONE: Duration = Duration::from_secs(30);

impl Args {
    /// Checks everything and opens the trace.
    ///
    /// # Errors
    /// All that is wrong, one line each.
    pub fn resolve(self) -> Result<Request, String> {
        let real_nvml = self.nvml == NvmlKind::Real;
        // A real GPU takes no simulated load, so there is nothing an HPA could do about it.
        let standalone = real_nvml || self.while_building || self.control_plane == ControlPlaneKind::None;
        let mut wrong = Vec::new();
        for (flag, value, range, why) in [
            ("peak", self.peak, PEAK, PEAK_WHY),
            ("loading", self.loading, LOADING, LOADING_WHY),
        ] {
            if !range.contains(&value) {
                let (least, most) = (range.start(), range.end());
                wrong.push(format!(
                    "--{flag} {value}: must be between {least} and {most}, because {why}"
                ));
            }
        }
        if self.duration.is_some_and(|seconds| seconds < SHORTEST) && self.trace.is_none() && !standalone {
            wrong.push(format!(
                "--duration: the built-in shape needs {SHORTEST} seconds to have a plateau"
            ));
        }
        let limit = self.duration.map(Duration::from_secs);
        let mut load_name = format!("built-in shape, seed {}", self.seed);
        let mut load: Arc<dyn OfferedLoad> =
            Arc::new(Shape::new(self.seed, limit.unwrap_or(SHAPE), self.peak));
        if let (Some(path), Some(column)) = (&self.trace, self.column) {
            let columns = Columns {
                time: self.time,
                value: column,
                sum_by_time: self.sum_by_time,
                scale: self.scale,
                speed: self.speed,
            };
            match Trace::read(path, &columns) {
                Ok(trace) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    load_name = format!("{name} at {}×, peak {:.1} GPUs", columns.speed, trace.peak());
                    load = Arc::new(CutOff {
                        length: limit.unwrap_or(Duration::MAX).min(trace.length()),
                        trace,
                    });
                }
                Err(error) => wrong.push(error.to_string()),
            }
        }
        if !wrong.is_empty() {
            return Err(wrong.join("\n"));
        }
        Ok(Request {
            load,
            load_name,
            loading: Duration::from_secs_f64(self.loading),
            seed: self.seed,
            standalone,
            real_nvml,
            while_building: self.while_building,
            hold: self.hold,
            page_port: self.page_port,
            standalone_for: limit.unwrap_or(STANDALONE),
        })
    }
}

/// A trace that ends early, and then offers nothing.
struct CutOff {
    trace: Trace,
    length: Duration,
}

impl OfferedLoad for CutOff {
    fn gpus(&self, since_start: Duration) -> f64 {
        if since_start >= self.length {
            0.0
        } else {
            self.trace.gpus(since_start)
        }
    }

    fn length(&self) -> Duration {
        self.length
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn resolve(args: &[&str]) -> Result<Request, String> {
        Args::try_parse_from(std::iter::once("forewarm-demo").chain(args.iter().copied()))
            .map_err(|error| error.to_string())?
            .resolve()
    }

    #[test]
    fn every_flag_but_help_has_an_env_twin() {
        for argument in Args::command().get_arguments() {
            let exempt = argument.is_hide_set() || ["help", "version"].contains(&argument.get_id().as_str());
            assert!(exempt || argument.get_env().is_some(), "{}", argument.get_id());
        }
    }

    #[test]
    fn all_bad_settings_are_reported_together() {
        let message = resolve(&[
            "--peak",
            "-1",
            "--loading",
            "NaN",
            "--trace",
            "no.csv",
            "--column",
            "x",
        ])
        .err()
        .unwrap();
        for part in ["--peak -1", "three replicas", "--loading NaN", "no.csv"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_trace_is_cut_off_and_then_silent() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "t,x\n0,100\n10,200\n20,300\n").unwrap();
        let path = file.path().to_str().unwrap();
        let request = resolve(&[
            "--trace",
            path,
            "--time",
            "t",
            "--column",
            "x",
            "--scale",
            "0.01",
            "--duration",
            "15",
        ])
        .unwrap();
        assert!((request.load.gpus(Duration::from_secs(12)) - 2.0).abs() < 1e-9);
        assert!(request.load.gpus(Duration::from_secs(15)).abs() < 1e-9);
        assert_eq!(request.load.length(), Duration::from_secs(15));
    }

    #[test]
    fn a_real_driver_means_no_control_plane() {
        assert!(resolve(&["--nvml", "real"]).unwrap().standalone);
        assert!(!resolve(&[]).unwrap().standalone);
    }
}
