//! How a program ends: exit codes, bad settings reported together, the reason in the termination log.
//!
//! Inputs: command-line arguments; the outcome of the program's one entry function.
//! Invariants: usage errors exit with 64 and list every bad setting, not the first one; other failures exit
//! with 1 and print each cause; `--help` and `--version` touch nothing and exit with 0.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::BoxError;

/// `EX_USAGE` of sysexits.h: the program was called with wrong settings, so starting it again cannot help.
pub const USAGE: u8 = 64;

/// Where the kubelet looks for a container's last words.
const TERMINATION_LOG: &str = "/dev/termination-log";
/// Environment variable that moves the termination log, for runs outside a container.
const TERMINATION_LOG_ENV: &str = "FOREWARM_TERMINATION_LOG";
/// The kubelet keeps this much of a termination message.
const TERMINATION_LOG_LIMIT: usize = 4096;

/// Collects every bad setting before the program gives up.
#[derive(Debug, Default)]
pub struct Problems {
    found: Vec<String>,
}

impl Problems {
    /// Nothing found yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes that `setting` (a flag or a path in a file) is wrong for this reason.
    pub fn add(&mut self, setting: &str, reason: impl fmt::Display) {
        self.found.push(format!("{setting}: {reason}"));
    }

    /// Takes the value of a checked setting, or notes why there is none.
    pub fn check<T, E: fmt::Display>(&mut self, setting: &str, checked: Result<T, E>) -> Option<T> {
        match checked {
            Ok(value) => Some(value),
            Err(reason) => {
                self.add(setting, reason);
                None
            }
        }
    }

    /// Whether every setting was good so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Ends the collection.
    ///
    /// # Errors
    /// [`UsageError`] with every problem that was noted.
    pub fn finish(self) -> Result<(), UsageError> {
        if self.found.is_empty() {
            Ok(())
        } else {
            Err(UsageError { problems: self.found })
        }
    }
}

/// Every bad setting of one start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError {
    problems: Vec<String>,
}

impl UsageError {
    /// Names the environment twin of each flag with it, as a command declares it: whoever set the variable and no flag
    /// looks for the variable.
    #[must_use]
    pub fn with_twins(mut self, command: &clap::Command) -> Self {
        for problem in &mut self.problems {
            let Some((flag, reason)) = problem.split_once(": ") else {
                continue;
            };
            let Some(long) = flag.strip_prefix("--") else {
                continue;
            };
            let mut commands = std::iter::once(command).chain(command.get_subcommands());
            let twin = commands.find_map(|command| {
                let mut args = command.get_arguments();
                args.find(|arg| arg.get_long() == Some(long))?.get_env()
            });
            if let Some(twin) = twin {
                *problem = format!("{flag} ({}): {reason}", twin.display());
            }
        }
        self
    }

    /// One line for each bad setting: `--flag: reason`.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [one] => f.write_str(one),
            several => {
                write!(f, "{} bad settings", several.len())?;
                several.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for UsageError {}

/// Why a program ends early.
///
/// Not an `Error` itself, so `?` turns any error into it; a [`UsageError`] keeps its exit code.
#[derive(Debug)]
pub enum Failure {
    /// Wrong settings: exit code 64.
    Usage(UsageError),
    /// Everything else: exit code 1.
    Other(BoxError),
}

impl Failure {
    /// Wraps an error that is boxed already.
    pub fn boxed(error: impl Into<BoxError>) -> Self {
        match error.into().downcast::<UsageError>() {
            Ok(usage) => Self::Usage(*usage),
            Err(other) => Self::Other(other),
        }
    }

    /// The exit code that a supervisor sees.
    #[must_use]
    pub const fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => USAGE,
            Self::Other(_) => 1,
        }
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::boxed(Box::new(error) as BoxError)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(usage) => usage.fmt(f),
            Self::Other(error) => f.write_str(&chain(error.as_ref())),
        }
    }
}

/// An error with all its causes on one line: `reading a: opening b: not found`.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        // Some errors print their source themselves; saying it twice only hides it.
        if !text.ends_with(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        cause = inner.source();
    }
    text
}

/// Parses the command line, or ends the process: 64 for usage errors, 0 after `--help` and `--version`.
#[must_use]
pub fn parse<A: clap::Parser>() -> A {
    match A::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // The terminal may be closed: there is nobody left to tell.
            let _unprintable = error.print();
            let notes = empty_twins(&A::command(), |name| std::env::var_os(name));
            for name in notes.iter().filter(|_| error.use_stderr()) {
                let _unprintable = writeln!(
                    std::io::stderr(),
                    "note: {} is set and empty; unset it or give it a value",
                    name.display()
                );
            }
            let code = if error.use_stderr() { i32::from(USAGE) } else { 0 };
            if error.use_stderr() {
                write_termination_log(&error.to_string());
            }
            std::process::exit(code)
        }
    }
}

/// Environment twins that are set to nothing: clap complains about their flag, which nobody gave.
fn empty_twins(command: &clap::Command, look: impl Fn(&OsStr) -> Option<OsString>) -> Vec<OsString> {
    command
        .get_arguments()
        .filter_map(clap::Arg::get_env)
        .filter(|name| look(name).is_some_and(|value| value.is_empty()))
        .map(OsStr::to_owned)
        .collect()
}

/// Turns the outcome of a program into its exit code, printing and recording the reason of a failure.
#[must_use]
pub fn finish(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            let _unprintable = writeln!(std::io::stderr(), "error: {text}");
            write_termination_log(&text);
            ExitCode::from(failure.code())
        }
    }
}

fn write_termination_log(text: &str) {
    let path =
        std::env::var_os(TERMINATION_LOG_ENV).map_or_else(|| PathBuf::from(TERMINATION_LOG), PathBuf::from);
    write_termination_log_at(&path, text);
}

/// Writes only where the kubelet (or a test) already made the file: elsewhere the path means nothing.
fn write_termination_log_at(path: &Path, text: &str) {
    let mut cut = text.len().min(TERMINATION_LOG_LIMIT);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    if let Ok(mut file) = std::fs::OpenOptions::new().write(true).truncate(true).open(path) {
        let _best_effort = file.write_all(&text.as_bytes()[..cut]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_twin_that_is_set_to_nothing_is_named() {
        let command = clap::Command::new("x")
            .arg(clap::Arg::new("a").long("a").env("X_A"))
            .arg(clap::Arg::new("b").long("b").env("X_B"));
        let found = empty_twins(&command, |name| match name.to_str() {
            Some("X_A") => Some(OsString::new()),
            _ => Some("set".into()),
        });
        assert_eq!(found, ["X_A"]);
    }

    #[test]
    fn every_bad_setting_is_listed() {
        let mut problems = Problems::new();
        assert_eq!(problems.check("--good", "5".parse::<u8>()), Some(5));
        assert_eq!(problems.check("--interval", "x".parse::<u8>()), None);
        problems.add("--listen", "has no port");
        assert!(!problems.is_empty());
        let error = problems.finish().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("--interval: invalid digit"), "{text}");
        assert!(text.contains("--listen: has no port"), "{text}");
    }

    #[test]
    fn no_problem_is_no_error() {
        let problems = Problems::new();
        assert!(problems.is_empty());
        assert!(problems.finish().is_ok());
    }

    #[test]
    fn usage_errors_keep_their_code_through_question_marks() {
        fn fails() -> Result<(), Failure> {
            let mut problems = Problems::new();
            problems.add("--x", "is wrong");
            problems.finish()?;
            Ok(())
        }
        assert_eq!(fails().unwrap_err().code(), 64);
        let other: Failure = std::io::Error::other("disk").into();
        assert_eq!(other.code(), 1);
    }

    #[test]
    fn termination_log_is_written_only_where_it_exists_and_cut_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("absent");
        write_termination_log_at(&absent, "reason");
        assert!(!absent.exists());

        let present = dir.path().join("present");
        std::fs::write(&present, "older and longer text").unwrap();
        write_termination_log_at(&present, "reason");
        assert_eq!(std::fs::read_to_string(&present).unwrap(), "reason");

        write_termination_log_at(&present, &"ä".repeat(4000));
        assert_eq!(std::fs::read_to_string(&present).unwrap().len(), 4096);
    }

    #[test]
    fn a_chain_names_each_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("reading the certificate")]
        struct Outer(#[source] std::io::Error);
        assert_eq!(
            chain(&Outer(std::io::Error::other("no such file"))),
            "reading the certificate: no such file"
        );
    }
}
