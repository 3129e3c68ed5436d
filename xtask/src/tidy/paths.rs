//! What files and folders may be called.
//!
//! Inputs: paths relative to the root. Invariants: a name says what is inside, so the drawers where anything
//! goes are banned; a test file of the tests crate says its level by its prefix.

use std::path::Path;

use super::Findings;

/// Names that describe no content; what ends up in them has no owner.
const BANNED: [&str; 7] = ["common", "utils", "util", "core", "types", "helpers", "misc"];
/// Levels of CONTRIBUTING.md.
const LEVELS: [&str; 5] = ["process", "apiserver", "node", "cluster", "device"];

/// Checks one path.
pub(super) fn check(path: &Path, findings: &mut Findings) {
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    if !is_rust && path.file_name().is_none_or(|name| name != "Cargo.toml") {
        return;
    }
    for part in path.iter() {
        let part = part.to_string_lossy();
        let stem = part.strip_suffix(".rs").unwrap_or(&part);
        if BANNED.contains(&stem) {
            findings.problems.push(format!(
                "{}: {stem:?} does not say what is inside; name it after its content",
                path.display()
            ));
        }
    }
    let Ok(test) = path.strip_prefix("tests/tests") else {
        return;
    };
    // Folders hold the modules of the test binary beside them.
    if test.components().count() == 1 {
        let stem = test
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default();
        let level = stem.split('_').next().unwrap_or_default();
        if !LEVELS.contains(&level) {
            findings.problems.push(format!(
                "{}: begin the name with its level ({})",
                path.display(),
                LEVELS.join(", ")
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(path: &str) -> usize {
        let mut findings = Findings::default();
        check(Path::new(path), &mut findings);
        findings.problems.len()
    }

    #[test]
    fn drawers_are_refused() {
        assert_eq!(problems("adapter/src/utils.rs"), 1);
        assert_eq!(problems("adapter/src/common/mod.rs"), 1);
        assert_eq!(problems("core/Cargo.toml"), 1);
        assert_eq!(problems("adapter/src/index/pods.rs"), 0);
        assert_eq!(problems("docs/core.md"), 0);
    }

    #[test]
    fn test_files_say_their_level() {
        assert_eq!(problems("tests/tests/apiserver.rs"), 0);
        assert_eq!(problems("tests/tests/process_exporter.rs"), 0);
        assert_eq!(problems("tests/tests/exporter.rs"), 1);
        assert_eq!(problems("tests/tests/apiserver/hpa.rs"), 0);
        assert_eq!(problems("tests/src/netns.rs"), 0);
    }
}
