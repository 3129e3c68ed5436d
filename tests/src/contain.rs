//! Runs a testbed so that nothing of it outlives it.
//!
//! ```text
//! outer process ── waits, passes signals on, returns the exit code
//!    └─ inner process: pid 1 of a private pid namespace ── this is where `main` goes on
//!          └─ etcd, API server, exporters, adapters …
//! ```
//! When the inner process ends, for whatever reason, the kernel kills everything in its pid namespace;
//! when the outer one is killed, the inner gets SIGKILL. No handler has to run for that.
//!
//! [`enter`] is the first call of `main`, before any thread starts. It also turns the re-executions of
//! the same binary that start simulated containers ([`crate::simnode::launcher`]) into those containers.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{Pid, getgid, getpid, getuid};

use crate::netns;
use crate::simnode::launcher;

/// Set in the inner process.
const INNER: &str = "FOREWARM_TESTBED_INNER";

/// Why the testbed could not be contained.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// See [`netns::Error`].
    #[error(transparent)]
    Network(#[from] netns::Error),
    /// The inner process did not start.
    #[error("cannot start the contained process: {0}")]
    Start(#[source] std::io::Error),
    /// A user namespace could not be mapped.
    #[error("cannot map the user into the namespace ({path}): {source}")]
    Map {
        /// The map file.
        path: &'static str,
        /// Why it was refused.
        source: std::io::Error,
    },
}

/// What `main` does after [`enter`].
#[derive(Debug)]
#[must_use]
pub enum Role {
    /// Go on: this is the contained process, with a private mount table and pid 1. Bind what must be
    /// reachable from outside, then call [`netns::enter`].
    Inner,
    /// Return this from `main`: the contained process has ended.
    Outer(ExitCode),
}

/// Splits the program into the waiting outer and the contained inner process.
///
/// # Errors
/// When namespaces are refused; the message says what to allow.
pub fn enter() -> Result<Role, Error> {
    if let Some(code) = launcher::run_if_asked() {
        return Ok(Role::Outer(code));
    }
    if std::env::var_os(INNER).is_some() {
        return inner().map(|()| Role::Inner);
    }
    outer().map(Role::Outer)
}

fn outer() -> Result<ExitCode, Error> {
    let threads = netns::threads();
    if threads > 1 {
        return Err(netns::Error::Threads(threads).into());
    }
    let mut wanted = CloneFlags::CLONE_NEWPID;
    let (uid, gid) = (getuid(), getgid());
    if !uid.is_root() {
        wanted |= CloneFlags::CLONE_NEWUSER;
    }
    unshare(wanted).map_err(|errno| netns::Error::Namespace {
        doing: "leave the pid namespace",
        source: errno.into(),
    })?;
    if !uid.is_root() {
        for (path, map) in [
            ("/proc/self/setgroups", "deny".to_owned()),
            ("/proc/self/uid_map", format!("0 {uid} 1")),
            ("/proc/self/gid_map", format!("0 {gid} 1")),
        ] {
            std::fs::write(path, map).map_err(|source| Error::Map { path, source })?;
        }
    }
    // Blocked before the child exists so that none is lost; the child inherits the mask and clears it itself.
    let mut awaited = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD] {
        awaited.add(signal);
    }
    awaited
        .thread_block()
        .map_err(|errno| Error::Start(errno.into()))?;
    let executable = std::env::current_exe().map_err(Error::Start)?;
    let mut arguments = std::env::args_os();
    let name = arguments
        .next()
        .unwrap_or_else(|| executable.clone().into_os_string());
    let mut child = Command::new(&executable)
        .arg0(name)
        .args(arguments)
        .env(INNER, "1")
        .spawn()
        .map_err(Error::Start)?;
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
    let mut asked = 0_u32;
    loop {
        let signal = awaited.wait().map_err(|errno| Error::Start(errno.into()))?;
        if signal != Signal::SIGCHLD {
            asked += 1;
            // A second request means the first was not quick enough for whoever asks.
            let passed_on = if asked > 1 {
                Signal::SIGKILL
            } else {
                Signal::SIGTERM
            };
            let _ = kill(pid, passed_on);
        }
        if let Some(status) = child.try_wait().map_err(Error::Start)? {
            let code = status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
    }
}

fn inner() -> Result<(), Error> {
    let refused = |doing: &'static str| {
        move |errno: nix::Error| netns::Error::Namespace {
            doing,
            source: errno.into(),
        }
    };
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(refused("tie this process to its parent"))?;
    SigSet::empty()
        .thread_set_mask()
        .map_err(refused("take signals again"))?;
    if getpid() == Pid::from_raw(1) {
        unshare(CloneFlags::CLONE_NEWNS).map_err(refused("leave the mount namespace"))?;
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .map_err(refused("make mounts private"))?;
        // /proc must show this pid namespace; where a container masks /proc the kernel refuses, and the
        // old one goes on to work for everything but pids.
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let _ = mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>);
    }
    Ok(())
}

/// Runs `clean_up` and ends the process with 130 at SIGINT or SIGTERM, for programs without an own
/// handler. Must be called before other threads start, which inherit the blocked signals.
///
/// # Errors
/// When signals cannot be blocked or the waiting thread cannot start.
pub fn at_interrupt(clean_up: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let mut awaited = SigSet::empty();
    awaited.add(Signal::SIGINT);
    awaited.add(Signal::SIGTERM);
    awaited.thread_block()?;
    std::thread::Builder::new()
        .name("interrupt".to_owned())
        .spawn(move || {
            if awaited.wait().is_ok() {
                clean_up();
                std::process::exit(130);
            }
        })?;
    Ok(())
}
