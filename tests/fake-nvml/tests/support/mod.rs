//! A prepared copy of the fake with its own settings and control file, loaded through nvml-wrapper.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::Control;
use forewarm_fake_nvml::settings::Settings;
use forewarm_fake_nvml::{elf, library};
use nvml_wrapper::Nvml;

/// Longest wait for something that should come at once; only a broken build reaches it.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// One fake driver in a folder of its own.
pub(crate) struct Fake {
    folder: tempfile::TempDir,
    pub(crate) library: PathBuf,
    pub(crate) control: Control,
}

/// The cdylib of this build, copied to `folder` from beside the test binary. Read once: a cargo that runs at the
/// same time may be writing that file anew.
pub(crate) fn cdylib(folder: &Path) -> PathBuf {
    static OBJECT: OnceLock<Vec<u8>> = OnceLock::new();
    let object = OBJECT.get_or_init(|| {
        let built = std::env::current_exe()
            .unwrap()
            .with_file_name("libforewarm_fake_nvml.so");
        let mut object = Vec::new();
        wait_until("the library is built along with this test", || {
            object = std::fs::read(&built).unwrap_or_default();
            elf::exported_symbols(&object).is_ok_and(|names| names.contains("nvmlInit_v2"))
        });
        object
    });
    let path = folder.join("built.so");
    std::fs::write(&path, object).unwrap();
    path
}

impl Fake {
    /// A fake without call cost, so that tests are quick; `settings` may say otherwise.
    pub(crate) fn new(settings: Settings) -> Self {
        Self::without(settings, &[])
    }

    /// A fake that lacks some symbols.
    pub(crate) fn without(settings: Settings, missing: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings {
            control: Some("control.json".into()),
            call_cost_us: settings.call_cost_us.or(Some(0)),
            ..settings
        };
        let library =
            library::prepare_with(&cdylib(folder.path()), folder.path(), &settings, missing).unwrap();
        Self {
            folder,
            library,
            control: Control::default(),
        }
    }

    pub(crate) fn h100() -> Self {
        Self::new(Settings::default())
    }

    pub(crate) fn t4() -> Self {
        Self::profile("t4")
    }

    pub(crate) fn profile(name: &str) -> Self {
        Self::new(Settings {
            profile: Some(name.into()),
            ..Settings::default()
        })
    }

    pub(crate) fn driver(version: &str) -> Self {
        Self::new(Settings {
            driver: Some(version.into()),
            ..Settings::default()
        })
    }

    pub(crate) fn virtual_time() -> Self {
        Self::new(Settings {
            virtual_time: Some(true),
            ..Settings::default()
        })
    }

    pub(crate) fn control_path(&self) -> PathBuf {
        self.folder.path().join("control.json")
    }

    /// Changes the control and writes it.
    pub(crate) fn set(&mut self, change: impl FnOnce(&mut Control)) {
        change(&mut self.control);
        self.control.write(&self.control_path()).unwrap();
    }

    /// Loads the copy and initialises it.
    pub(crate) fn nvml(&self) -> Nvml {
        Nvml::builder().lib_path(self.library.as_os_str()).init().unwrap()
    }
}

/// Calls `condition` until it holds; fails at the deadline.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "{what}");
        std::thread::yield_now();
    }
    started.elapsed()
}
