//! Reads what the host's `/proc` tells of a process: its cgroup, and when it started.
//!
//! Inputs: the folder that `--proc` names. Invariants: nothing is kept; each read is bounded; of a process only `stat`
//! and `cgroup` are read, which any user may, and which do not wait for the process.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cgroup::{self, NoPod, Owner};

/// 14 controllers with a path each: far more than any layout that is known.
const LONGEST_CGROUP: usize = 32 * 1024;
/// 52 numbers and a name of 64 bytes at most.
const LONGEST_STAT: usize = 4 * 1024;
/// Two numbers.
const LONGEST_UPTIME: usize = 128;
/// `USER_HZ`, which Linux fixes at 100 for everything that user space sees.
const TICKS_PER_SECOND: u64 = 100;
/// In a host's process namespace this is `kthreadd`; in any other it is some process of a container.
const KTHREADD: u32 = 2;
/// `PF_KTHREAD` of `include/linux/sched.h`, in field 9 of `stat`.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// The host's `/proc`.
#[derive(Debug, Clone)]
pub struct Proc {
    root: PathBuf,
}

/// Why a file of a process was not read.
#[derive(Debug, thiserror::Error)]
pub enum Unread {
    /// The process has ended.
    #[error("no such process")]
    Gone,
    /// It may not be read.
    #[error("not permitted")]
    Refused,
    /// Longer than such a file can be, or not in its form.
    #[error("not in the form of this file")]
    Malformed,
    /// Any other failure.
    #[error(transparent)]
    Failed(io::Error),
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        // ESRCH: the process ended between opening and reading.
        const ESRCH: i32 = 3;
        match error.kind() {
            ErrorKind::NotFound => Self::Gone,
            _ if error.raw_os_error() == Some(ESRCH) => Self::Gone,
            ErrorKind::PermissionDenied => Self::Refused,
            ErrorKind::InvalidData => Self::Malformed,
            _ => Self::Failed(error),
        }
    }
}

/// Whose processes the folder shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shows {
    /// The host's, which are the ones a driver names.
    Host,
    /// Those of a container: the same numbers are other processes there.
    Container,
    /// Nothing that can be read.
    Nothing,
}

/// What is read of `stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    flags: u64,
    start_ticks: u64,
}

impl Proc {
    /// The folder, `/proc` or where the host's is mounted.
    #[must_use]
    pub const fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Whose processes the folder shows. Told by process 2, which is a kernel thread on every host and in no container.
    #[must_use]
    pub fn shows(&self) -> Shows {
        match self.stat(KTHREADD) {
            Ok(stat) if stat.flags & KERNEL_THREAD != 0 => Shows::Host,
            // No process 2: a container has its first one only. Without a clock it is no /proc at all.
            Ok(_) => Shows::Container,
            Err(_) if self.uptime().is_ok() => Shows::Container,
            Err(_) => Shows::Nothing,
        }
    }

    /// When a process started: field 22 of `stat`, in hundredths of a second since the machine started.
    ///
    /// # Errors
    /// [`Unread`].
    pub fn start_ticks(&self, pid: u32) -> Result<u64, Unread> {
        Ok(self.stat(pid)?.start_ticks)
    }

    /// How long the machine has been up, in the clock of [`Self::start_ticks`].
    ///
    /// # Errors
    /// [`Unread`].
    pub fn uptime(&self) -> Result<Duration, Unread> {
        let text = read(&self.root.join("uptime"), LONGEST_UPTIME)?;
        parse_uptime(&text).ok_or(Unread::Malformed)
    }

    /// Who owns the process that has this id and start.
    ///
    /// # Errors
    /// [`Unread`], also where the id is another process's by now.
    pub fn owner(&self, pid: u32, start_ticks: u64) -> Result<Result<Owner, NoPod>, Unread> {
        let text = read(&self.root.join(pid.to_string()).join("cgroup"), LONGEST_CGROUP)?;
        // Afterwards: then the cgroup was that of the process which has this start.
        if self.start_ticks(pid)? != start_ticks {
            return Err(Unread::Gone);
        }
        let text = String::from_utf8(text).map_err(|_| Unread::Malformed)?;
        Ok(cgroup::owner(&text))
    }

    fn stat(&self, pid: u32) -> Result<Stat, Unread> {
        let text = read(&self.root.join(pid.to_string()).join("stat"), LONGEST_STAT)?;
        parse_stat(&text).ok_or(Unread::Malformed)
    }
}

/// How long ago a process started.
#[must_use]
pub fn age(start_ticks: u64, uptime: Duration) -> Duration {
    const NANOSECONDS: u64 = 1_000_000_000 / TICKS_PER_SECOND;
    let started = Duration::from_nanos(start_ticks.saturating_mul(NANOSECONDS));
    uptime.saturating_sub(started)
}

/// `pid (comm) state ppid …`: the name may hold spaces, parentheses and bytes that are no text, so fields are counted
/// after the last parenthesis.
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(text.get(end + 1..)?).ok()?;
    // The first field after the name is the third.
    let mut fields = fields.split_ascii_whitespace().skip(9 - 3);
    let flags = fields.next()?.parse().ok()?;
    let start_ticks = fields.nth(22 - 9 - 1)?.parse().ok()?;
    Some(Stat { flags, start_ticks })
}

fn parse_uptime(text: &[u8]) -> Option<Duration> {
    let first = std::str::from_utf8(text).ok()?.split_ascii_whitespace().next()?;
    Duration::try_from_secs_f64(first.parse().ok()?).ok()
}

/// A whole file of at most so many bytes.
fn read(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(512);
    let limit = u64::try_from(most).unwrap_or(u64::MAX);
    File::open(path)?.take(limit + 1).read_to_end(&mut text)?;
    if text.len() > most {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 0 0 18446744073709551615 0";

    fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, Proc) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let proc = Proc::new(dir.path().to_owned());
        (dir, proc)
    }

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_move_the_fields() {
        for name in ["python", "a b", "(sd-pam)", "x) S 1 2 (y", ")", "", "((("] {
            let stat = parse_stat(format!("42 ({name}) {STAT}").as_bytes());
            assert_eq!(stat.map(|stat| stat.start_ticks), Some(987_654), "{name}");
        }
        let mut odd = b"42 (\xff\xfe) ".to_vec();
        odd.extend_from_slice(STAT.as_bytes());
        assert_eq!(parse_stat(&odd).map(|stat| stat.start_ticks), Some(987_654));
        for broken in [
            "",
            "42",
            "42 (python",
            "42 (python) S 1 2",
            "42 (python) S 1 2 3 4 5 x",
        ] {
            assert_eq!(parse_stat(broken.as_bytes()), None, "{broken}");
        }
    }

    #[test]
    fn this_process_is_found_in_the_real_folder() {
        let proc = Proc::new("/proc".into());
        let uptime = proc.uptime().unwrap();
        let start = proc.start_ticks(std::process::id()).unwrap();
        assert!(age(start, uptime) < uptime);
        assert!(proc.owner(std::process::id(), start).is_ok());
        assert!(matches!(
            proc.owner(std::process::id(), start + 1),
            Err(Unread::Gone)
        ));
        assert!(matches!(proc.start_ticks(u32::MAX), Err(Unread::Gone)));
    }

    #[test]
    fn a_hosts_folder_is_told_by_its_kernel_thread() {
        let kthreadd = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 1 0 0 20 0 1 0 25 0 0";
        let user = "2 (kthreadd) S 1 0 0 0 -1 4194560 0 0 0 0 0 1 0 0 20 0 1 0 25 0 0";
        let uptime = ("uptime", "1234.56 99.00\n");
        assert_eq!(folder(&[uptime, ("2/stat", kthreadd)]).1.shows(), Shows::Host);
        assert_eq!(folder(&[uptime, ("2/stat", user)]).1.shows(), Shows::Container);
        assert_eq!(folder(&[uptime]).1.shows(), Shows::Container);
        assert_eq!(folder(&[]).1.shows(), Shows::Nothing);
        assert_eq!(Proc::new("/nowhere".into()).shows(), Shows::Nothing);
    }

    #[test]
    fn files_that_are_too_long_are_refused() {
        let long = "9".repeat(LONGEST_CGROUP + 1);
        let stat = format!("7 (x) {STAT}");
        let (_dir, proc) = folder(&[("7/cgroup", &long), ("7/stat", &stat), ("8/stat", &long)]);
        assert!(matches!(proc.owner(7, 987_654), Err(Unread::Malformed)));
        assert!(matches!(proc.start_ticks(8), Err(Unread::Malformed)));
    }

    #[test]
    fn an_age_is_in_hundredths_of_a_second_and_never_below_zero() {
        let up = Duration::from_secs(100);
        assert_eq!(age(9_950, up), Duration::from_millis(500));
        assert_eq!(age(20_000, up), Duration::ZERO);
        assert_eq!(age(u64::MAX, up), Duration::ZERO);
        assert_eq!(parse_uptime(b"12.34 5.6\n"), Some(Duration::from_millis(12_340)));
        assert_eq!(parse_uptime(b"-1 0"), None);
        assert_eq!(parse_uptime(b"NaN"), None);
    }
}
