//! The binaries and the fake driver library, built from the present sources.
//!
//! Inputs: cargo and the workspace this crate was compiled in.
//! Invariants: built at most once per test process and profile; a plain `cargo test` never runs stale binaries.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use cargo_metadata::{Message, TargetKind};

/// Paths of what a build made.
#[derive(Debug, Clone)]
pub struct Artefacts {
    /// The `forewarm-exporter` program.
    pub exporter: PathBuf,
    /// The `forewarm-adapter` program.
    pub adapter: PathBuf,
    /// The stand-in for `libnvidia-ml.so.1`.
    pub fake_nvml: PathBuf,
}

/// Why there are no artefacts: the build's own words.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot build the programs under test: {0}")]
pub struct BuildError(String);

/// No `--package`: cargo then resolves features for all members, as `cargo xtask test` does, and compiles no
/// dependency a second time for us.
const TARGETS: [&str; 5] = ["--lib", "--bin", "forewarm-exporter", "--bin", "forewarm-adapter"];

/// A tiny test: with it cargo resolves features of dev-dependencies in, as for the tests themselves.
const FEATURES_AS_TESTS: [&str; 2] = ["--test", "stable_names"];

/// The artefacts of the dev profile, built by the first caller.
///
/// # Errors
/// The build failed, for every caller alike.
pub fn artefacts() -> Result<&'static Artefacts, BuildError> {
    static DEV: OnceLock<Result<Artefacts, BuildError>> = OnceLock::new();
    DEV.get_or_init(|| Artefacts::build(&FEATURES_AS_TESTS))
        .as_ref()
        .map_err(Clone::clone)
}

impl Artefacts {
    /// The artefacts of the release profile, for figures; built by the first caller.
    ///
    /// # Errors
    /// The build failed, for every caller alike.
    pub fn release() -> Result<&'static Self, BuildError> {
        static RELEASE: OnceLock<Result<Artefacts, BuildError>> = OnceLock::new();
        RELEASE
            .get_or_init(|| Self::build(&["--release"]))
            .as_ref()
            .map_err(Clone::clone)
    }

    fn build(profile: &[&str]) -> Result<Self, BuildError> {
        let failed = |error: &dyn std::fmt::Display| BuildError(error.to_string());
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .current_dir(root)
            .args(["build", "--message-format=json-render-diagnostics", "--locked"])
            .args(TARGETS)
            .args(profile)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        // What cargo tells this test about its own package. ring's build script runs again when these change, and
        // then TLS and all that hangs on it is compiled again, here and in the next build outside of a test.
        for name in std::env::vars_os().map(|(name, _)| name) {
            let text = name.to_string_lossy();
            if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"]
                .iter()
                .any(|prefix| text.starts_with(prefix))
            {
                command.env_remove(&name);
            }
        }
        let mut build = command.spawn().map_err(|error| failed(&error))?;
        let stdout = build.stdout.take().ok_or_else(|| failed(&"no output"))?;

        let (mut exporter, mut adapter, mut fake_nvml) = (None, None, None);
        for message in Message::parse_stream(BufReader::new(stdout)) {
            let Ok(Message::CompilerArtifact(artifact)) = message else {
                continue;
            };
            if let Some(executable) = artifact.executable {
                match artifact.target.name.as_str() {
                    "forewarm-exporter" => exporter = Some(executable.into_std_path_buf()),
                    "forewarm-adapter" => adapter = Some(executable.into_std_path_buf()),
                    _ => {}
                }
            } else if artifact.target.is_kind(TargetKind::CDyLib)
                && artifact.target.name == "forewarm_fake_nvml"
            {
                fake_nvml = artifact
                    .filenames
                    .into_iter()
                    .find(|file| file.extension() == Some("so"))
                    .map(cargo_metadata::camino::Utf8PathBuf::into_std_path_buf);
            }
        }
        let status = build.wait().map_err(|error| failed(&error))?;
        if !status.success() {
            return Err(failed(&format!("cargo {status}")));
        }
        let built = |path: Option<PathBuf>, what: &str| {
            path.ok_or_else(|| failed(&format!("the build made no {what}")))
        };
        Ok(Self {
            exporter: built(exporter, "forewarm-exporter")?,
            adapter: built(adapter, "forewarm-adapter")?,
            fake_nvml: built(fake_nvml, "libforewarm_fake_nvml.so")?,
        })
    }
}
