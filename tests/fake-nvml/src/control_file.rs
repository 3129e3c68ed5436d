//! Watches the control file: notices a change, keeps the last good content.
//!
//! A change is seen by inode, modification time and length; a file younger than [`RACY`] is read again at the next
//! look, since two quick writes can share all three. A malformed file is reported on stderr once and ignored.

use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::control::Control;

/// Kernel time stamps advance in steps of up to 10 ms.
const RACY: Duration = Duration::from_millis(50);

/// Identity of one version of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    modified_us: u64,
    length: u64,
}

/// The watched file and what was last seen in it.
#[derive(Debug)]
pub(crate) struct ControlFile {
    path: PathBuf,
    stamp: Option<Stamp>,
    racy: bool,
    text: Option<String>,
}

/// New content of the control file.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) control: Control,
    /// When the file was written, µs since the epoch.
    pub(crate) written_us: u64,
}

pub(crate) fn epoch_us() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}

impl ControlFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            path,
            stamp: None,
            racy: false,
            text: None,
        }
    }

    fn look(&self) -> Option<Stamp> {
        let metadata = std::fs::metadata(&self.path).ok()?;
        let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Stamp {
            inode: metadata.ino(),
            modified_us: modified.as_micros() as u64,
            length: metadata.len(),
        })
    }

    /// The content if it changed since the last call. A file that went away is an idle node.
    pub(crate) fn changed(&mut self) -> Option<Change> {
        let stamp = self.look();
        if stamp == self.stamp && !self.racy {
            return None;
        }
        self.stamp = stamp;
        let Some(stamp) = stamp else {
            self.racy = false;
            return self.text.take().map(|_| Change {
                control: Control::default(),
                written_us: epoch_us(),
            });
        };
        self.racy = epoch_us().saturating_sub(stamp.modified_us) < RACY.as_micros() as u64;
        let text = std::fs::read_to_string(&self.path).ok()?;
        if self.text.as_ref() == Some(&text) {
            return None;
        }
        let parsed = Control::parse(&self.path, &text);
        self.text = Some(text);
        match parsed {
            Ok(control) => Some(Change {
                control,
                written_us: stamp.modified_us,
            }),
            Err(cause) => {
                // Once per content: the text was stored above. Nothing to do if stderr is closed.
                _ = writeln!(
                    io::stderr(),
                    "fake-nvml: {cause}; the last good control stays in force"
                );
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_good_content_stays_and_absence_is_idle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.json");
        let mut file = ControlFile::new(path.clone());
        assert!(file.changed().is_none(), "an absent file is no change");

        let mut control = Control::default();
        control.gpu(0).busy = Some(0.25);
        control.write(&path).unwrap();
        assert_eq!(file.changed().unwrap().control, control);
        assert!(file.changed().is_none());

        std::fs::write(&path, "{broken").unwrap();
        assert!(file.changed().is_none());
        control.gpu(0).busy = Some(0.5);
        control.write(&path).unwrap();
        assert_eq!(file.changed().unwrap().control, control);

        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.changed().unwrap().control, Control::default());
    }

    #[test]
    fn two_writes_in_one_clock_tick_are_both_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.json");
        let mut file = ControlFile::new(path.clone());
        for step in 0..50 {
            // Same length each time.
            let control = Control {
                now_ms: Some(1000 + step),
                ..Control::default()
            };
            control.write(&path).unwrap();
            assert_eq!(file.changed().unwrap().control, control, "step {step}");
        }
    }
}
