//! Puts a copy of the library where a client will load it.
//!
//! A driver level is more than a version string: an old driver lacks symbols. [`prepare`] copies the built cdylib,
//! takes out the symbols its level does not have, names it `libnvidia-ml.so.1` and leaves settings beside it.

use std::io;
use std::path::{Path, PathBuf};

use crate::driver_level::{Driver, absent_symbols};
use crate::elf::{ElfError, strip_symbols};
use crate::settings::Settings;

/// File name that NVML clients look for.
pub const FILE_NAME: &str = "libnvidia-ml.so.1";

/// Why a library could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// Reading the source or writing the copy failed.
    #[error("{path}: {cause}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The source is not the fake, or a symbol to take out is not in it.
    #[error("{path}: {cause}")]
    Elf {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: ElfError,
    },
    /// The driver version does not parse.
    #[error("driver version {0:?}: expected major.minor[.patch]")]
    Driver(String),
}

/// Copies the cdylib `source` to `folder/libnvidia-ml.so.1` without the symbols that driver `level` lacks and
/// without `missing`, and writes `fake-nvml.toml` with that driver beside it. Returns the path of the copy.
///
/// # Errors
/// [`PrepareError`] names the file and the cause.
pub fn prepare(source: &Path, folder: &Path, level: &str, missing: &[&str]) -> Result<PathBuf, PrepareError> {
    prepare_with(
        source,
        folder,
        &Settings {
            driver: Some(level.to_owned()),
            ..Settings::default()
        },
        missing,
    )
}

/// As [`prepare`], with all settings; the level is `settings.driver`, without one the library keeps all symbols.
///
/// # Errors
/// [`PrepareError`] names the file and the cause.
pub fn prepare_with(
    source: &Path,
    folder: &Path,
    settings: &Settings,
    missing: &[&str],
) -> Result<PathBuf, PrepareError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |cause| PrepareError::Io { path, cause }
    };
    let mut absent = match &settings.driver {
        Some(level) => {
            absent_symbols(&Driver::parse(level).ok_or_else(|| PrepareError::Driver(level.clone()))?)
        }
        None => Vec::new(),
    };
    absent.extend(
        missing
            .iter()
            .filter(|name| !absent.contains(name))
            .copied()
            .collect::<Vec<_>>(),
    );

    let mut object = std::fs::read(source).map_err(io(source))?;
    strip_symbols(&mut object, &absent).map_err(|cause| PrepareError::Elf {
        path: source.to_owned(),
        cause,
    })?;
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let path = folder.join(FILE_NAME);
    // A new inode each time: a process that has the old copy mapped keeps it whole.
    let temporary = folder.join(format!("{FILE_NAME}.{}.tmp", std::process::id()));
    std::fs::write(&temporary, object).map_err(io(&temporary))?;
    std::fs::rename(&temporary, &path).map_err(io(&path))?;
    settings.write_beside(folder).map_err(io(folder))?;
    Ok(path)
}
