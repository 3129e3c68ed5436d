//! Counts what a test runner says while passing its output through untouched.
//!
//! Inputs: lines of libtest (or libtest-mimic) and cargo. Invariants: no line is changed, dropped or
//! reordered within its stream; `recordings_skipped: NAME (REASON)` and `skipped: NAME (REASON)` are how a
//! test says on stderr that it could not do its work.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};

use crate::repository::described;

/// What the runners of one level said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    pub(crate) recordings_skipped: u64,
}

impl Counts {
    /// Adds what one line says.
    pub(crate) fn read(&mut self, line: &str) {
        let line = line.trim();
        if let Some(result) = line.strip_prefix("test result: ") {
            let number = |what: &str| {
                result
                    .split(['.', ';'])
                    .filter_map(|part| part.trim().strip_suffix(what))
                    .find_map(|number| number.trim().parse::<u64>().ok())
                    .unwrap_or(0)
            };
            self.passed += number("passed");
            self.failed += number("failed");
            self.skipped += number("ignored");
        } else if line.starts_with("recordings_skipped: ") {
            self.recordings_skipped += 1;
        } else if line.starts_with("skipped: ") {
            self.skipped += 1;
        }
    }

    /// Adds another runner's counts.
    pub(crate) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.recordings_skipped += other.recordings_skipped;
    }
}

/// Runs a command, passing both streams through and counting on the way.
pub(crate) fn count(command: &mut Command) -> Result<(ExitStatus, Counts)> {
    count_into(command, std::io::stdout(), std::io::stderr())
}

fn count_into(
    command: &mut Command,
    our_stdout: impl Write + Send,
    our_stderr: impl Write + Send,
) -> Result<(ExitStatus, Counts)> {
    let name = described(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{name} did not start"))?;
    let counts = Arc::new(Mutex::new(Counts::default()));
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        if let Some(stdout) = stdout {
            let counts = Arc::clone(&counts);
            scope.spawn(move || pass(stdout, our_stdout, &counts));
        }
        if let Some(stderr) = stderr {
            let counts = Arc::clone(&counts);
            scope.spawn(move || pass(stderr, our_stderr, &counts));
        }
    });
    let status = child.wait().with_context(|| format!("waiting for {name}"))?;
    let counts = counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok((status, counts))
}

fn pass(from: impl Read, mut to: impl Write, counts: &Mutex<Counts>) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        let _closed = to.write_all(&line).and_then(|()| to.flush());
        counts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .read(&String::from_utf8_lossy(&line));
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_summed() {
        let mut counts = Counts::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test result: ok. 39 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.10s",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s",
            "recordings_skipped: replay of a trace (no data)",
            "skipped: netns (not permitted)",
            "the word skipped: in a sentence",
        ] {
            counts.read(line);
        }
        let wanted = Counts {
            passed: 40,
            failed: 2,
            skipped: 2,
            recordings_skipped: 1,
        };
        assert_eq!(counts, wanted);
    }

    #[test]
    fn both_streams_are_counted_and_passed_on_untouched() {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo 'test result: ok. 2 passed; 0 failed; 0 ignored;'; echo 'recordings_skipped: x (y)' >&2; exit 3",
        ]);
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let (status, counts) = count_into(&mut command, &mut stdout, &mut stderr).unwrap();
        assert_eq!(status.code(), Some(3));
        assert_eq!((counts.passed, counts.recordings_skipped), (2, 1));
        assert_eq!(stdout, b"test result: ok. 2 passed; 0 failed; 0 ignored;\n");
        assert_eq!(stderr, b"recordings_skipped: x (y)\n");
    }
}
