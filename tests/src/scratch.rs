//! Temporary folders that go with their owner, even if it is killed.
//!
//! Dropping a [`Scratch`] removes its folder. No drop runs after SIGKILL, so the first folder that a process makes also
//! removes those whose owner is gone.
//!
//! Invariants: a folder is removed by another process only while it holds the lock on the folder's [`OWNER`] file, which
//! the kernel takes from a process when that ends and at no other time. So neither a reused pid nor a pid of another
//! pid namespace can pass for the owner. Nothing is touched that has no such file, or that is another user's.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Once;

use tempfile::TempDir;

/// What all our folders' names begin with.
const PREFIX: &str = "forewarm-";
/// The file in each folder that its owner keeps locked.
const OWNER: &str = ".owner";

/// A temporary folder with an owner.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
    /// Locked until it is closed. Children do not inherit it: the standard library opens files close-on-exec.
    _owner: File,
}

impl Scratch {
    /// Makes a folder `forewarm-<purpose>-…` for this process.
    ///
    /// # Errors
    /// The folder or its owner file cannot be made.
    pub fn new(purpose: &str) -> io::Result<Self> {
        static SWEPT: Once = Once::new();
        let place = tempfile::env::temp_dir();
        SWEPT.call_once(|| sweep(&place));
        Self::new_in(&place, purpose)
    }

    fn new_in(place: &Path, purpose: &str) -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{purpose}-"))
            .tempdir_in(place)?;
        let mut owner = File::create_new(folder.path().join(OWNER))?;
        owner.lock()?;
        // Written under the lock: a sweep that comes in between sees an empty file and leaves the folder alone.
        writeln!(owner, "{}", std::process::id())?;
        Ok(Self {
            folder,
            _owner: owner,
        })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes the folders whose owners are gone. What cannot be removed stays: it is in nobody's way.
fn sweep(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        // Of the entry itself: a link is not followed.
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let folder = entry.path();
            match remove_if_abandoned(&folder) {
                Ok(true) => tracing::info!(folder = %folder.display(), "left by a killed owner, removed"),
                Ok(false) => {}
                Err(error) => tracing::debug!(folder = %folder.display(), %error, "not removed"),
            }
        }
    }
}

/// True when the folder had no owner and is gone.
fn remove_if_abandoned(folder: &Path) -> io::Result<bool> {
    let owner = File::open(folder.join(OWNER))?;
    match owner.try_lock() {
        Ok(()) if owner.metadata()?.len() > 0 => {
            // The lock is held until all is gone, so that two sweeps do not meet.
            fs::remove_dir_all(folder)?;
            Ok(true)
        }
        Ok(()) | Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::child::Child;

    /// Set for the process that owns a folder in this place until it is killed.
    const OWN_IN: &str = "FOREWARM_TEST_OWN_SCRATCH_IN";
    const OWNING: &str = "scratch::tests::a_folder_of_a_killed_owner_goes_at_the_next_start_and_no_other";

    fn folders(place: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(place)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_of_a_killed_owner_goes_at_the_next_start_and_no_other() {
        if let Some(place) = std::env::var_os(OWN_IN) {
            let _owned = Scratch::new_in(Path::new(&place), "killed").unwrap();
            fs::write(Path::new(&place).join("owned"), "").unwrap();
            loop {
                std::thread::park();
            }
        }
        let place = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", OWNING]).env(OWN_IN, place.path());
        let log = tempfile::NamedTempFile::new().unwrap();
        // Killed also if this test fails.
        let mut owner = Child::start("owner", command, log.path()).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !place.path().join("owned").exists() {
            assert!(owner.exited().is_none(), "it ended by itself");
            assert!(std::time::Instant::now() < deadline, "it owns nothing");
            std::thread::yield_now();
        }
        fs::remove_file(place.path().join("owned")).unwrap();
        // Somebody else's folders with such a name: without an owner file, with one that is not claimed yet, and a link.
        fs::create_dir(place.path().join("forewarm-foreign")).unwrap();
        fs::create_dir(place.path().join("forewarm-unclaimed")).unwrap();
        fs::write(place.path().join("forewarm-unclaimed").join(OWNER), "").unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::write(elsewhere.path().join(OWNER), "1\n").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), place.path().join("forewarm-link")).unwrap();
        let ours = Scratch::new_in(place.path(), "ours").unwrap();

        let all = folders(place.path());
        assert_eq!(all.len(), 5, "{all:?}");
        sweep(place.path());
        assert_eq!(folders(place.path()), all, "all owners live");

        owner.kill();
        sweep(place.path());
        let left = folders(place.path());
        let gone: Vec<_> = all.iter().filter(|name| !left.contains(name)).collect();
        assert!(
            matches!(gone.as_slice(), [name] if name.starts_with("forewarm-killed-")),
            "{gone:?}"
        );
        assert!(elsewhere.path().join(OWNER).exists());

        drop(ours);
        assert_eq!(folders(place.path()).len(), 3, "a drop needs no sweep");
    }

    #[test]
    fn the_pid_in_the_owner_file_decides_nothing() {
        let place = tempfile::tempdir().unwrap();
        let left = place.path().join("forewarm-left-1");
        fs::create_dir(&left).unwrap();
        // A pid that lives: reused since, or one of this process's own namespace.
        fs::write(left.join(OWNER), format!("{}\n", std::process::id())).unwrap();
        sweep(place.path());
        assert!(!left.exists());
    }
}
