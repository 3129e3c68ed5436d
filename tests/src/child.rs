//! A child process that ends with its owner, with its output in a file.
//!
//! Invariants: each child leads its own process group, so a terminal's Ctrl-C reaches only us; dropping
//! a [`Child`] kills the group and reaps it; [`crate::contain`] covers the ways in which no drop runs.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How often a stopping child is looked at.
const STOP_PAUSE: Duration = Duration::from_millis(20);

/// A running or ended child process.
#[derive(Debug)]
pub struct Child {
    name: String,
    log: PathBuf,
    process: std::process::Child,
    ended: Option<ExitStatus>,
}

impl Child {
    /// Starts `command` with its output appended to `log`.
    ///
    /// # Errors
    /// When the log cannot be opened or the program cannot be started; the message names the program.
    pub fn start(name: &str, mut command: Command, log: &Path) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("cannot start {name} ({:?}): {error}", command.get_program()),
            )
        };
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .map_err(named)?;
        let errors = output.try_clone().map_err(named)?;
        let process = command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn();
        let process = process.map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot start {name} ({:?}): {error}", command.get_program()),
            )
        })?;
        Ok(Self {
            name: name.to_owned(),
            log: log.to_owned(),
            process,
            ended: None,
        })
    }

    /// What the child was started as.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The file with its output.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Its exit status once it has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.process.try_wait().ok().flatten();
        }
        self.ended
    }

    /// Sends a signal to its process group; a child that has ended gets none.
    pub fn signal(&mut self, signal: Signal) {
        if self.exited().is_none() {
            let _ = killpg(self.group(), signal);
        }
    }

    /// Asks it to end, waits for `grace`, then kills it.
    pub async fn stop(&mut self, grace: Duration) -> Option<ExitStatus> {
        self.signal(Signal::SIGTERM);
        let deadline = Instant::now() + grace;
        while self.exited().is_none() && Instant::now() < deadline {
            tokio::time::sleep(STOP_PAUSE).await;
        }
        self.kill();
        self.ended
    }

    /// Kills and reaps it.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        if self.ended.is_none() {
            self.ended = self.process.wait().ok();
        }
    }

    /// The last part of its output, for messages about failures.
    #[must_use]
    pub fn log_tail(&self, bytes: u64) -> String {
        tail(&self.log, bytes)
    }

    fn group(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).unwrap_or(i32::MAX))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last `bytes` of a file, from the start of a line.
#[must_use]
pub fn tail(path: &Path, bytes: u64) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let start = length.saturating_sub(bytes);
        file.seek(SeekFrom::Start(start))?;
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        let text = String::from_utf8_lossy(&content).into_owned();
        Ok(if start == 0 {
            text
        } else {
            text.split_once('\n')
                .map_or(text.clone(), |(_, rest)| rest.to_owned())
        })
    };
    read().unwrap_or_else(|error| format!("(no output: {error})"))
}
