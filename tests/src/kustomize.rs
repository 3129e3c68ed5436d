//! Renders `manifests/` with kustomize, so that tests install the very files that users apply.
//!
//! The binary comes from `FOREWARM_KUSTOMIZE`, the cache folder or `PATH`; `cargo xtask controlplane`
//! builds it into the cache from `tests/kustomize/go.mod`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::controlplane::binaries::cache_folder;

/// Release in `tests/kustomize/go.mod`; also the name of the cache folder.
pub const VERSION: &str = "v5.8.1";

/// Why manifests could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No binary, or it did not start.
    #[error("cannot run kustomize ({program}): {source} (build it once by `cargo xtask controlplane`)")]
    Start {
        /// What was tried.
        program: String,
        /// Why it did not start.
        source: std::io::Error,
    },
    /// kustomize refused the folder.
    #[error("kustomize refuses {folder}: {message}")]
    Refused {
        /// The folder.
        folder: PathBuf,
        /// What it wrote.
        message: String,
    },
    /// The output is not YAML that we can read.
    #[error("cannot read what kustomize made of {folder}: {message}")]
    Unreadable {
        /// The folder.
        folder: PathBuf,
        /// Why.
        message: String,
    },
}

/// Renders one kustomization into its objects, in kustomize's order.
///
/// # Errors
/// When kustomize is missing, refuses the folder, or writes something that is not YAML.
pub fn render(folder: &Path) -> Result<Vec<Value>, Error> {
    let program = program();
    // Overlays of tests lie in temporary folders and refer to the manifests by path.
    let output = Command::new(&program)
        .args(["build", "--load-restrictor", "LoadRestrictionsNone"])
        .arg(folder)
        .output()
        .map_err(|source| Error::Start {
            program: program.display().to_string(),
            source,
        })?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Refused {
            folder: folder.to_owned(),
            message,
        });
    }
    objects(&String::from_utf8_lossy(&output.stdout)).map_err(|message| Error::Unreadable {
        folder: folder.to_owned(),
        message,
    })
}

/// Splits a multi-document YAML text into its non-empty objects.
///
/// # Errors
/// The parser's message.
pub fn objects(text: &str) -> Result<Vec<Value>, String> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|error| error.to_string())?;
    Ok(documents
        .into_iter()
        .filter(|document| !document.is_null())
        .collect())
}

fn program() -> PathBuf {
    if let Some(named) = std::env::var_os("FOREWARM_KUSTOMIZE").filter(|value| !value.is_empty()) {
        return PathBuf::from(named);
    }
    cache_folder()
        .map(|cache| cache.join("kustomize").join(VERSION).join("kustomize"))
        .filter(|cached| cached.is_file())
        .unwrap_or_else(|| PathBuf::from("kustomize"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_split_and_empty_ones_dropped() {
        let objects = objects("a: 1\n---\n---\nb: \"2\"\n").unwrap();
        assert_eq!(
            objects,
            vec![serde_json::json!({"a": 1}), serde_json::json!({"b": "2"})]
        );
    }
}
