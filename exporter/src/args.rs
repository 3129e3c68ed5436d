//! The command line: raw arguments, then a resolved configuration, all bad settings told together.
//!
//! Invariants: every flag has an environment twin; resolving reads the web config and touches nothing else.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forewarm_runtime::admin::AdminArgs;
use forewarm_runtime::exit::{Problems, UsageError};
use forewarm_runtime::kube::ClientArgs;
use forewarm_runtime::listen::ListenAddr;
use forewarm_runtime::logs::LogArgs;

use crate::web_config::WebConfig;

/// GPM needs 100 ms between two samples.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
/// Slower than this, no autoscaler could use the values.
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

const EXAMPLES: &str = "\
Examples:
  # What does this node's driver say right now?
  forewarm-exporter once

  # Serve on loopback and look at memory alone (ages come along)
  forewarm-exporter --listen 127.0.0.1:9410
  curl -s 'http://127.0.0.1:9410/metrics?name[]=gpu_memory_used_bytes'

  # A driver in an unusual place, twice a second, behind TLS and passwords
  forewarm-exporter --nvml-library /run/nvidia/driver/usr/lib64/libnvidia-ml.so.1 \\
      --interval 500ms --web-config web.yaml

Starts without a driver and waits for it: until then gpu_* series are absent and
forewarm_exporter_nvml_up is 0. A bad setting ends the program with code 64.";

/// Serves GPU and per-pod readings of this node for Prometheus and the Forewarm adapter.
///
/// Each value carries its age; what is stale, refused or unsupported is absent, never 0.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "forewarm-exporter", version, after_help = EXAMPLES)]
pub struct Args {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Address of /metrics and /metrics/detail; port 0 lets the kernel choose.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_LISTEN",
        default_value = "[::]:9410",
        value_name = "HOST:PORT",
        global = true
    )]
    pub listen: String,

    /// The driver's management library; found by the system's loader when absent.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_NVML_LIBRARY",
        value_name = "FILE",
        global = true
    )]
    pub nvml_library: Option<PathBuf>,

    /// Time between two readings, 100ms to 60s.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_INTERVAL",
        default_value = "1s",
        value_name = "DURATION",
        global = true
    )]
    pub interval: String,

    /// Names of the series: native, dcgm or both. This version speaks native only.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_FORMAT",
        default_value = "native",
        value_name = "FORMAT",
        global = true
    )]
    pub format: String,

    /// Which dcgm-exporter to be like: 3, 4.6-names, 4.8.2 or 4.8.3. Comes with --format dcgm.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_DCGM_COMPAT",
        value_name = "VERSION",
        global = true
    )]
    pub dcgm_compat: Option<String>,

    /// Name of this node, for asking the API server about its pods where the kubelet does not tell.
    #[arg(long, env = "FOREWARM_EXPORTER_NODE_NAME", value_name = "NAME", global = true)]
    pub node_name: Option<String>,

    /// The kubelet's folder, with pod-resources/ and pods-api/ below.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_KUBELET_DIR",
        default_value = "/var/lib/kubelet",
        value_name = "DIR",
        global = true
    )]
    pub kubelet_dir: PathBuf,

    /// The host's /proc, for readings per process. This version reads none and only keeps the flag's place.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_PROC",
        default_value = "/proc",
        value_name = "DIR",
        global = true
    )]
    pub proc: PathBuf,

    /// TLS and basic authentication of the metrics port, in exporter-toolkit's format.
    #[arg(
        long,
        env = "FOREWARM_EXPORTER_WEB_CONFIG",
        value_name = "FILE",
        global = true
    )]
    pub web_config: Option<PathBuf>,

    /// Kubernetes client flags.
    #[command(flatten)]
    pub kube: ClientArgs,

    /// Admin flags.
    #[command(flatten)]
    pub admin: AdminArgs,

    /// Log flags.
    #[command(flatten)]
    pub logs: LogArgs,
}

/// What to do instead of serving.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Reads everything once (rates and GPM need two readings, one interval apart), prints it and ends.
    Once {
        /// text, as /metrics would answer, or json.
        #[arg(
            long,
            env = "FOREWARM_EXPORTER_OUTPUT",
            default_value = "text",
            value_name = "FORMAT"
        )]
        output: String,
    },
}

/// How `once` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// As `/metrics` answers.
    Text,
    /// One JSON object.
    Json,
}

/// Settings that were checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// How `once` prints; `None` serves.
    pub once: Option<Output>,
    /// The metrics port.
    pub listen: ListenAddr,
    /// The admin port.
    pub admin: ListenAddr,
    /// The driver's library.
    pub nvml_library: Option<PathBuf>,
    /// Time between two readings.
    pub interval: Duration,
    /// Name of this node.
    pub node_name: Option<String>,
    /// The kubelet's folder.
    pub kubelet_dir: PathBuf,
    /// TLS and passwords.
    pub web: Option<Arc<WebConfig>>,
    /// The API server.
    pub kube: ClientArgs,
    /// Logs.
    pub logs: LogArgs,
}

impl Args {
    /// Checks everything.
    ///
    /// # Errors
    /// Every bad setting, together.
    pub fn resolve(self) -> Result<Config, UsageError> {
        let mut problems = Problems::new();
        let listen = problems.check("--listen", self.listen.parse::<ListenAddr>());
        let admin = self.admin.resolve(&mut problems);
        let interval = problems.check("--interval", interval(&self.interval));
        problems.check("--format", format(&self.format));
        if let Some(version) = &self.dcgm_compat {
            problems.check("--dcgm-compat", dcgm_compat(version));
        }
        let web = self.web_config.map(WebConfig::load);
        let web = web.and_then(|loaded| problems.check("--web-config", loaded));
        let once = self.command.map(|Command::Once { output }| output);
        let once = once.and_then(|name| problems.check("--output", output(&name)));
        let node_name = self.node_name.filter(|name| !name.is_empty());
        self.logs.check(&mut problems);
        let command = <Self as clap::CommandFactory>::command();
        problems.finish().map_err(|bad| bad.with_twins(&command))?;
        Ok(Config {
            once,
            // Defaults never come into use: a bad address was a problem above.
            listen: listen.unwrap_or_else(|| ListenAddr::any(9410)),
            admin: admin.unwrap_or_else(|| ListenAddr::any(9411)),
            nvml_library: self.nvml_library,
            interval: interval.unwrap_or(Duration::from_secs(1)),
            node_name,
            kubelet_dir: self.kubelet_dir,
            web,
            kube: self.kube,
            logs: self.logs,
        })
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let shape =
        || format!("{text:?} is not a duration; write a number and ms, s or m, for example 500ms or 1s");
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(shape)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| shape())?;
    let milliseconds = match unit {
        "ms" => Some(number),
        "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        _ => return Err(shape()),
    };
    let interval = milliseconds.map(Duration::from_millis).ok_or_else(shape)?;
    if (SHORTEST_INTERVAL..=LONGEST_INTERVAL).contains(&interval) {
        Ok(interval)
    } else {
        Err(format!("{text} is outside 100ms to 60s"))
    }
}

fn format(name: &str) -> Result<(), String> {
    match name {
        "native" => Ok(()),
        "dcgm" | "both" => Err(format!(
            "{name:?} is not there yet: this version writes native names only; use native, or keep dcgm-exporter beside it"
        )),
        _ => Err(format!("{name:?} is not a format; use native")),
    }
}

fn dcgm_compat(version: &str) -> Result<(), String> {
    match version {
        "3" | "4.6-names" | "4.8.2" | "4.8.3" => {
            Err("belongs to --format dcgm or both, which are not there yet; leave it out".to_owned())
        }
        _ => Err(format!("{version:?} is not one of 3, 4.6-names, 4.8.2, 4.8.3")),
    }
}

fn output(name: &str) -> Result<Output, String> {
    match name {
        "text" => Ok(Output::Text),
        "json" => Ok(Output::Json),
        _ => Err(format!("{name:?} is not an output; use text or json")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};

    fn parse(args: &[&str]) -> Args {
        Args::try_parse_from(std::iter::once(&"forewarm-exporter").chain(args)).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_flag_has_an_environment_twin() {
        for arg in Args::command().get_arguments() {
            let Some(long) = arg.get_long().filter(|long| !["help", "version"].contains(long)) else {
                continue;
            };
            assert!(arg.get_env().is_some(), "--{long}");
        }
    }

    #[test]
    fn defaults_serve() {
        let config = parse(&[]).resolve().unwrap();
        assert_eq!(config.once, None);
        assert_eq!(config.listen.port(), 9410);
        assert_eq!(config.interval, Duration::from_secs(1));
    }

    #[test]
    fn flags_stand_before_or_after_once() {
        let after = parse(&["once", "--output", "json", "--interval", "200ms"])
            .resolve()
            .unwrap();
        assert_eq!(
            (after.once, after.interval),
            (Some(Output::Json), Duration::from_millis(200))
        );
        let before = parse(&["--interval", "200ms", "once"]).resolve().unwrap();
        assert_eq!(
            (before.once, before.interval),
            (Some(Output::Text), Duration::from_millis(200))
        );
    }

    #[test]
    fn all_bad_settings_are_told_together() {
        let args = [
            "--listen",
            "nowhere",
            "--interval",
            "1h",
            "--format",
            "dcgm",
            "--dcgm-compat",
            "9",
            "--web-config",
            "/nonexistent.yaml",
            "--log-level",
            "debgu",
            "once",
            "--output",
            "xml",
        ];
        let error = parse(&args).resolve().unwrap_err();
        let text = error.to_string();
        for part in [
            "--listen",
            "--interval",
            "--format",
            "--dcgm-compat",
            "--web-config",
            "--log-level",
            "--output",
        ] {
            assert!(
                error.problems().iter().any(|problem| problem.starts_with(part)),
                "{part} in {text}"
            );
        }
        assert!(text.contains("not there yet"), "{text}");
    }

    #[test]
    fn a_bad_setting_names_its_environment_twin() {
        let args = [
            ["--listen", "nowhere"],
            ["--admin-listen", "nowhere"],
            ["--interval", "1h"],
            ["--format", "dcgm"],
            ["--dcgm-compat", "9"],
            ["--web-config", "/nonexistent.yaml"],
            ["--log-level", "debgu"],
            ["--log-format", "xml"],
        ];
        let mut line: Vec<&str> = args.iter().flatten().copied().collect();
        line.extend(["once", "--output", "xml"]);
        let error = parse(&line).resolve().unwrap_err();
        for flag in args.iter().map(|[flag, _]| *flag).chain(["--output"]) {
            let found = error.problems().iter().find(|problem| problem.starts_with(flag));
            let twin = flag.trim_start_matches('-').to_uppercase().replace('-', "_");
            let found = found.unwrap_or_else(|| panic!("{flag} in {error}"));
            let (names, _) = found.split_once("): ").unwrap_or_else(|| panic!("{found}"));
            assert!(names.contains("(FOREWARM_") && names.ends_with(&twin), "{found}");
        }
    }

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(interval("100ms"), Ok(SHORTEST_INTERVAL));
        assert_eq!(interval("1m"), Ok(LONGEST_INTERVAL));
        for bad in [
            "99ms",
            "61s",
            "1",
            "s",
            "1.5s",
            "-1s",
            "",
            "99999999999999999999s",
            "18446744073709551615m",
        ] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
