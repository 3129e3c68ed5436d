//! Logs: two formats on stderr and a filter that can be changed while the program runs.
//!
//! Inputs: `--log-format`, `--log-level` or their environment twins. Invariants: stdout is never written to,
//! so command output stays clean; colours only where stderr is a terminal and `NO_COLOR` is not set.

use std::io::IsTerminal as _;
use std::str::FromStr;
use std::sync::Arc;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};

use crate::exit::Problems;

/// Log flags, made for flattening into a program's arguments.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Logs")]
pub struct LogArgs {
    /// Log format: text or json.
    #[arg(
        long,
        env = "FOREWARM_LOG_FORMAT",
        default_value = "text",
        value_name = "FORMAT"
    )]
    pub log_format: String,

    /// Log filter: a level (error, warn, info, debug, trace) or target=level pairs with commas between.
    #[arg(
        long,
        env = "FOREWARM_LOG_LEVEL",
        default_value = "info",
        value_name = "FILTER"
    )]
    pub log_level: String,
}

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// One line for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Why the logs could not be set up or changed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The format is not a known one.
    #[error("{0:?} is not a log format; use text or json")]
    Format(String),
    /// The filter does not parse.
    #[error("{filter:?} is not a log filter: {reason}")]
    Filter {
        /// The filter as given.
        filter: String,
        /// What the parser said.
        reason: String,
    },
    /// Something else has set up logs in this process.
    #[error("logs are set up already")]
    Twice,
}

impl FromStr for LogFormat {
    type Err = LogError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(LogError::Format(text.to_owned())),
        }
    }
}

impl LogArgs {
    /// Notes every bad log setting.
    pub fn check(&self, problems: &mut Problems) {
        problems.check("--log-format", self.log_format.parse::<LogFormat>());
        problems.check("--log-level", parse_filter(&self.log_level));
    }
}

type ReloadFn = dyn Fn(EnvFilter) -> Result<(), LogError> + Send + Sync;

/// Changes the log filter of the running program.
#[derive(Clone)]
pub struct LogControl {
    reload: Arc<ReloadFn>,
}

impl std::fmt::Debug for LogControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogControl")
    }
}

impl LogControl {
    /// A control without logs behind it: checks filters, changes nothing. For tests and one-shot commands.
    #[must_use]
    pub fn detached() -> Self {
        Self {
            reload: Arc::new(|_| Ok(())),
        }
    }

    /// Replaces the filter.
    ///
    /// # Errors
    /// [`LogError::Filter`] when it does not parse; the old filter stays.
    pub fn set(&self, filter: &str) -> Result<(), LogError> {
        (self.reload)(parse_filter(filter)?)
    }
}

/// Sets up the logs of the process.
///
/// # Errors
/// A bad format or filter, or a second call in one process.
pub fn init(args: &LogArgs) -> Result<LogControl, LogError> {
    let format: LogFormat = args.log_format.parse()?;
    let (filter, handle) = reload::Layer::new(parse_filter(&args.log_level)?);
    let lines = tracing_subscriber::fmt::layer::<Registry>().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
        LogFormat::Text => lines.with_ansi(color_is_welcome()).boxed(),
    };
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .try_init()
        .map_err(|_| LogError::Twice)?;
    Ok(LogControl {
        reload: Arc::new(move |new| {
            handle.reload(new).map_err(|error| LogError::Filter {
                filter: String::new(),
                reason: error.to_string(),
            })
        }),
    })
}

fn color_is_welcome() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

fn parse_filter(text: &str) -> Result<EnvFilter, LogError> {
    let refused = |reason: String| LogError::Filter {
        filter: text.to_owned(),
        reason,
    };
    if text.trim().is_empty() {
        return Err(refused("it is empty".to_owned()));
    }
    // A bare word that is no level would silently become a target filter that mutes everything else.
    for part in text.split(',').map(str::trim) {
        if !part.contains(['=', '[', ':', '_']) && part.parse::<tracing::metadata::LevelFilter>().is_err() {
            return Err(refused(format!("{part:?} is not a level")));
        }
    }
    EnvFilter::builder()
        .parse(text)
        .map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_parse_and_nothing_else() {
        assert_eq!("text".parse::<LogFormat>().unwrap(), LogFormat::Text);
        assert_eq!("json".parse::<LogFormat>().unwrap(), LogFormat::Json);
        assert!(
            "xml"
                .parse::<LogFormat>()
                .unwrap_err()
                .to_string()
                .contains("text or json")
        );
    }

    #[test]
    fn a_misspelled_level_is_refused() {
        assert!(parse_filter("debgu").is_err());
        assert!(parse_filter("").is_err());
        assert!(parse_filter("forewarm_adapter=loud").is_err());
        assert!(parse_filter("info,forewarm_adapter=debug").is_ok());
        assert!(parse_filter("off").is_ok());
    }

    #[test]
    fn every_bad_log_setting_is_noted() {
        let args = LogArgs {
            log_format: "xml".to_owned(),
            log_level: "debgu".to_owned(),
        };
        let mut problems = Problems::new();
        args.check(&mut problems);
        let error = problems.finish().unwrap_err();
        assert_eq!(error.problems().len(), 2, "{error}");
    }

    #[test]
    fn the_filter_changes_while_running() {
        let args = LogArgs {
            log_format: "json".to_owned(),
            log_level: "warn".to_owned(),
        };
        let control = init(&args).unwrap();
        assert!(!tracing::enabled!(tracing::Level::DEBUG));
        control.set("debug").unwrap();
        assert!(tracing::enabled!(tracing::Level::DEBUG));
        control.set("warn").unwrap();
        assert!(!tracing::enabled!(tracing::Level::DEBUG));
        assert!(control.set("debgu").is_err());
        assert!(matches!(init(&args), Err(LogError::Twice)));
    }
}
