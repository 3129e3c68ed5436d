//! One of our programs, running: its ports from its log, its probes, its end.
//!
//! Inputs: a command that makes the program log to stderr and listen on port 0.
//! Invariants: killed when dropped; a failing test prints the log's end.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::child::Child;
use crate::wait::{Late, until};

/// A program that does not listen after this time has failed: a debug build on a busy machine needs a second or two.
const START: Duration = Duration::from_secs(30);
/// How much of the log a failing test prints.
const TAIL: u64 = 16 * 1024;

/// A running program.
#[derive(Debug)]
pub struct Program {
    child: Child,
}

impl Program {
    /// Starts a program with its output in `folder`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(name: &str, command: Command, folder: &Path) -> std::io::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        Ok(Self {
            child: Child::start(name, command, &log)?,
        })
    }

    /// Waits for a log line that contains `listening` and the word `server`, and returns the address in it.
    ///
    /// # Errors
    /// The program ended, or no such line came in time; the message holds the log.
    pub async fn listening(&mut self, server: &str) -> Result<SocketAddr, Late> {
        let what = format!("{} listening ({server})", self.child.name());
        let child = std::cell::RefCell::new(&mut self.child);
        until(&what, START, || async {
            let mut child = child.borrow_mut();
            let log = std::fs::read_to_string(child.log()).unwrap_or_default();
            if let Some(addr) = address(&log, server) {
                return Ok(addr);
            }
            let ended = child.exited();
            Err(format!("exit {ended:?}, log:\n{}", child.log_tail(TAIL)))
        })
        .await
    }

    /// Waits for the program to end by itself.
    ///
    /// # Errors
    /// It still runs after `within`.
    pub async fn ended(&mut self, within: Duration) -> Result<ExitStatus, Late> {
        let what = format!("{} ended", self.child.name());
        let child = std::cell::RefCell::new(&mut self.child);
        until(&what, within, || async {
            let mut child = child.borrow_mut();
            let ended = child.exited();
            ended.ok_or_else(|| format!("it runs, log:\n{}", child.log_tail(TAIL)))
        })
        .await
    }

    /// Sends a signal.
    pub fn signal(&mut self, signal: Signal) {
        self.child.signal(signal);
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Its exit status if it has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.exited()
    }

    /// Everything it has written.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.child.log()).unwrap_or_default()
    }
}

impl Drop for Program {
    #[allow(clippy::print_stderr, reason = "the evidence of a failing test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "--- log of {} ---\n{}",
                self.child.name(),
                self.child.log_tail(TAIL)
            );
        }
    }
}

/// The first address in the last line about `server` that says `listening`, in either log format.
fn address(log: &str, server: &str) -> Option<SocketAddr> {
    let line = log
        .lines()
        .rev()
        .find(|line| line.contains("listening") && line.contains(server))?;
    line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '=' | ','))
        .map(|word| word.trim_end_matches('}'))
        .find_map(|word| word.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found_in_both_log_formats() {
        let text = "2026-12-01T15:00:00Z  INFO listening server=\"metrics\" address=127.0.0.1:4321\n";
        assert_eq!(address(text, "metrics").unwrap().port(), 4321);
        let json = r#"{"level":"INFO","message":"listening","server":"admin","address":"[::1]:99"}"#;
        assert_eq!(address(json, "admin").unwrap().port(), 99);
        assert_eq!(address(json, "metrics"), None);
    }
}
