//! Settings of one loaded fake: which profile, how many GPUs, which driver, where the control file is.
//!
//! Inputs: a file `fake-nvml.toml` in the folder of the loaded library (found with `dladdr`), and the environment
//! `FAKE_NVML_*`. The file wins key by key, because it says which of several fakes in one process is meant;
//! the environment fills what it leaves out. Read at the first `nvmlInit` and again when the library is
//! initialised anew.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::driver_level::Driver;
use crate::profile::Profile;

/// File name looked for beside the library.
pub const FILE_NAME: &str = "fake-nvml.toml";

/// Most GPUs of one fake: the size of the static handle table.
pub const MAX_GPUS: u32 = 64;

/// What a call costs unless the settings say otherwise; a common assumption, to be replaced by measured figures.
pub const DEFAULT_CALL_COST_US: u64 = 50;

/// Settings as written; absent fields take their default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Built-in profile name or path of a profile file (`FAKE_NVML_PROFILE`, default `h100-sxm`). Several with commas
    /// between them are the models of the GPUs in turn; the last one is also that of all further GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Number of GPUs (`FAKE_NVML_GPUS`, default by profile; with several profiles, one each).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
    /// Driver version (`FAKE_NVML_DRIVER`, default `580.95.05`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Control file (`FAKE_NVML_CONTROL`); without one all GPUs idle. Relative to the folder of the library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<PathBuf>,
    /// Cost of a call in µs, spent spinning (`FAKE_NVML_CALL_COST_US`, default 50).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_cost_us: Option<u64>,
    /// Time advances by the control file's `now_ms` only (`FAKE_NVML_VIRTUAL_TIME=1`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_time: Option<bool>,
    /// Seed of UUIDs and serials (`FAKE_NVML_UUID_SEED`, default `forewarm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid_seed: Option<String>,
    /// Cost in µs by NVML call name, over `call_cost_us`. File only.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub call_costs_us: BTreeMap<String, u64>,
}

/// Why settings are no good.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file beside the library is malformed.
    #[error("{path}: {cause}")]
    File {
        /// The file.
        path: PathBuf,
        /// Parser's or reader's message.
        cause: String,
    },
    /// An environment variable has no meaning.
    #[error("{name}={value}: {expected}")]
    Variable {
        /// Variable name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The profile could not be loaded.
    #[error(transparent)]
    Profile(#[from] crate::profile::ProfileError),
    /// The driver version does not parse.
    #[error("driver version {0:?}: expected major.minor[.patch]")]
    Driver(String),
    /// More GPUs than handles.
    #[error("{0} GPUs: at most {MAX_GPUS}")]
    TooManyGpus(u32),
}

/// Settings with every default filled in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// Models of the GPUs in turn, at least one; the last one is that of all further GPUs.
    pub(crate) profiles: Vec<Arc<Profile>>,
    pub(crate) gpus: u32,
    pub(crate) driver: Driver,
    pub(crate) control: Option<PathBuf>,
    pub(crate) call_cost_us: u64,
    pub(crate) call_costs_us: BTreeMap<String, u64>,
    pub(crate) virtual_time: bool,
    pub(crate) uuid_seed: String,
}

impl Settings {
    /// Writes the settings beside a library in `folder`.
    ///
    /// # Errors
    /// The I/O error.
    pub fn write_beside(&self, folder: &Path) -> io::Result<()> {
        let text =
            toml::to_string(self).map_err(|cause| io::Error::new(io::ErrorKind::InvalidData, cause))?;
        std::fs::write(folder.join(FILE_NAME), text)
    }

    /// Reads the settings beside a library in `folder`; none there is the default.
    fn read_beside(folder: &Path) -> Result<Self, SettingsError> {
        let path = folder.join(FILE_NAME);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(cause) => {
                return Err(SettingsError::File {
                    path,
                    cause: cause.to_string(),
                });
            }
        };
        let mut settings: Self = toml::from_str(&text).map_err(|cause| SettingsError::File {
            path,
            cause: cause.to_string(),
        })?;
        settings.control = settings.control.map(|control| folder.join(control));
        if let Some(profiles) = &mut settings.profile {
            let beside = |name: &str| {
                if name.ends_with(".toml") {
                    folder.join(name).to_string_lossy().into_owned()
                } else {
                    name.to_owned()
                }
            };
            *profiles = profiles.split(',').map(beside).collect::<Vec<_>>().join(",");
        }
        Ok(settings)
    }

    /// Fills absent fields from the environment.
    fn or_environment(mut self, variable: impl Fn(&str) -> Option<String>) -> Result<Self, SettingsError> {
        fn number<N: std::str::FromStr>(
            name: &'static str,
            value: Option<String>,
        ) -> Result<Option<N>, SettingsError> {
            value
                .map(|value| {
                    value.parse().map_err(|_| SettingsError::Variable {
                        name,
                        value,
                        expected: "a whole number",
                    })
                })
                .transpose()
        }
        self.profile = self.profile.or_else(|| variable("FAKE_NVML_PROFILE"));
        self.driver = self.driver.or_else(|| variable("FAKE_NVML_DRIVER"));
        self.control = self
            .control
            .or_else(|| variable("FAKE_NVML_CONTROL").map(PathBuf::from));
        self.uuid_seed = self.uuid_seed.or_else(|| variable("FAKE_NVML_UUID_SEED"));
        self.gpus = self
            .gpus
            .or(number("FAKE_NVML_GPUS", variable("FAKE_NVML_GPUS"))?);
        self.call_cost_us = self.call_cost_us.or(number(
            "FAKE_NVML_CALL_COST_US",
            variable("FAKE_NVML_CALL_COST_US"),
        )?);
        if self.virtual_time.is_none() {
            self.virtual_time = match variable("FAKE_NVML_VIRTUAL_TIME").as_deref() {
                None | Some("" | "0" | "false") => None,
                Some("1" | "true") => Some(true),
                Some(value) => {
                    return Err(SettingsError::Variable {
                        name: "FAKE_NVML_VIRTUAL_TIME",
                        value: value.to_owned(),
                        expected: "0 or 1",
                    });
                }
            };
        }
        Ok(self)
    }

    fn resolve(self) -> Result<Resolved, SettingsError> {
        let names = self.profile.as_deref().unwrap_or("h100-sxm").split(',');
        let profiles: Vec<Arc<Profile>> = names
            .map(|name| Profile::load(name.trim()).map(Arc::new))
            .collect::<Result<_, _>>()?;
        let driver = self.driver.unwrap_or_else(|| "580.95.05".to_owned());
        let gpus = self.gpus.unwrap_or(match profiles.as_slice() {
            [only] => only.gpus,
            several => several.len() as u32,
        });
        if gpus > MAX_GPUS {
            return Err(SettingsError::TooManyGpus(gpus));
        }
        Ok(Resolved {
            gpus,
            driver: Driver::parse(&driver).ok_or(SettingsError::Driver(driver))?,
            control: self.control,
            call_cost_us: self.call_cost_us.unwrap_or(DEFAULT_CALL_COST_US),
            call_costs_us: self.call_costs_us,
            virtual_time: self.virtual_time.unwrap_or(false),
            uuid_seed: self.uuid_seed.unwrap_or_else(|| "forewarm".to_owned()),
            profiles,
        })
    }
}

impl Resolved {
    /// Model of GPU `index`.
    pub(crate) fn profile_of(&self, index: u32) -> Option<Arc<Profile>> {
        self.profiles
            .get(index as usize)
            .or(self.profiles.last())
            .cloned()
    }

    /// Settings of this very copy of the library.
    pub(crate) fn load() -> Result<Self, SettingsError> {
        let beside = match crate::loaded_from::folder() {
            Some(folder) => Settings::read_beside(&folder)?,
            None => Settings::default(),
        };
        beside
            .or_environment(|name| std::env::var(name).ok())
            .and_then(Settings::resolve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_wins_over_the_environment_key_by_key() {
        let folder = tempfile::tempdir().unwrap();
        Settings {
            gpus: Some(2),
            control: Some("c.json".into()),
            ..Settings::default()
        }
        .write_beside(folder.path())
        .unwrap();
        let settings = Settings::read_beside(folder.path())
            .unwrap()
            .or_environment(|name| match name {
                "FAKE_NVML_GPUS" => Some("5".to_owned()),
                "FAKE_NVML_PROFILE" => Some("t4".to_owned()),
                _ => None,
            })
            .unwrap();
        assert_eq!(settings.gpus, Some(2));
        assert_eq!(settings.profile.as_deref(), Some("t4"));
        assert_eq!(settings.control, Some(folder.path().join("c.json")));
    }

    #[test]
    fn bad_values_are_named() {
        let error = Settings::default()
            .or_environment(|name| (name == "FAKE_NVML_GPUS").then(|| "many".to_owned()))
            .unwrap_err();
        assert!(error.to_string().contains("FAKE_NVML_GPUS=many"), "{error}");
        let error = Settings {
            driver: Some("new".into()),
            ..Settings::default()
        }
        .resolve()
        .unwrap_err();
        assert!(error.to_string().contains("new"), "{error}");
        assert!(
            Settings {
                gpus: Some(65),
                ..Settings::default()
            }
            .resolve()
            .is_err()
        );
    }
}
