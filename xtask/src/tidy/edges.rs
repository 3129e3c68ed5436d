//! Which member may depend on which, and which members may not depend on what.
//!
//! Inputs: cargo's metadata, `rust-toolchain.toml`. Invariants: the table is the one of ARCHITECTURE.md; a
//! member that is not in it fails, so that its edges are decided on; components never depend on each other.

use std::path::Path;

use anyhow::{Context as _, Result};
use cargo_metadata::{DependencyKind, Metadata};
use serde::Deserialize;

use super::Findings;

/// A member, the members it may depend on, and whether it may use crates of others at all.
struct Edges {
    member: &'static str,
    may_use: May,
    /// Prefixes of crates from elsewhere that break the member's promise.
    never: &'static [&'static str],
}

enum May {
    These(&'static [&'static str]),
    Anything,
}

const ASYNC_AND_CLUSTER: &[&str] = &[
    "tokio",
    "futures",
    "kube",
    "k8s-openapi",
    "axum",
    "hyper",
    "tonic",
    "reqwest",
];

const EDGES: &[Edges] = &[
    Edges {
        member: "forewarm-signals",
        may_use: May::These(&[]),
        never: ASYNC_AND_CLUSTER,
    },
    Edges {
        member: "forewarm-runtime",
        may_use: May::These(&["forewarm-signals"]),
        never: &["nvml"],
    },
    Edges {
        member: "forewarm-nvml",
        may_use: May::These(&["forewarm-signals"]),
        never: ASYNC_AND_CLUSTER,
    },
    Edges {
        member: "forewarm-exporter",
        may_use: May::These(&["forewarm-signals", "forewarm-runtime", "forewarm-nvml"]),
        never: &["nvml-wrapper", "libloading"],
    },
    Edges {
        member: "forewarm-adapter",
        may_use: May::These(&["forewarm-signals", "forewarm-runtime"]),
        never: &["nvml", "libloading", "tonic"],
    },
    Edges {
        member: "forewarm-fake-nvml",
        may_use: May::These(&[]),
        never: ASYNC_AND_CLUSTER,
    },
    Edges {
        member: "forewarm-tests",
        may_use: May::Anything,
        never: &[],
    },
    Edges {
        member: "xtask",
        may_use: May::Anything,
        never: &[],
    },
];

/// A stand-in that any member may use in its own tests.
const FOR_TESTS: &str = "forewarm-fake-nvml";

/// One dependency of a member, as far as edges go.
struct Edge<'a> {
    from: &'a str,
    to: &'a str,
    to_member: bool,
    in_tests: bool,
}

/// Checks every edge of the workspace.
pub(super) fn check(metadata: &Metadata, findings: &mut Findings) {
    for package in metadata.workspace_packages() {
        check_member(&package.name, findings);
        for dependency in &package.dependencies {
            let edge = Edge {
                from: &package.name,
                to: &dependency.name,
                to_member: dependency.path.is_some(),
                in_tests: dependency.kind == DependencyKind::Development,
            };
            check_edge(&edge, findings);
        }
        let manifest = std::fs::read_to_string(&package.manifest_path).unwrap_or_default();
        if !inherits_lints(&manifest) {
            findings.problems.push(format!(
                "{}: add `[lints] workspace = true`",
                package.manifest_path
            ));
        }
    }
}

fn check_member(member: &str, findings: &mut Findings) {
    if !EDGES.iter().any(|edges| edges.member == member) {
        findings.problems.push(format!(
            "member {member} is not in the table of allowed edges: decide on its edges in ARCHITECTURE.md and xtask/src/tidy/edges.rs"
        ));
    }
}

fn check_edge(edge: &Edge<'_>, findings: &mut Findings) {
    let Some(edges) = EDGES.iter().find(|edges| edges.member == edge.from) else {
        return;
    };
    let &Edge {
        from,
        to,
        to_member,
        in_tests,
    } = edge;
    if to_member {
        let allowed = match edges.may_use {
            May::Anything => true,
            May::These(members) => members.contains(&to) || (in_tests && (to == FOR_TESTS || to == from)),
        };
        if !allowed {
            findings.problems.push(format!(
                "{from} may not depend on {to}: see the allowed edges in ARCHITECTURE.md"
            ));
        }
    } else if !in_tests
        && edges
            .never
            .iter()
            .any(|never| to == *never || to.starts_with(&format!("{never}-")))
    {
        findings.problems.push(format!(
            "{from} promises to do without {to}: see the allowed edges in ARCHITECTURE.md"
        ));
    }
}

fn inherits_lints(manifest: &str) -> bool {
    manifest
        .split("[lints]")
        .nth(1)
        .is_some_and(|table| table.trim_start().starts_with("workspace = true"))
}

#[derive(Deserialize)]
struct ToolchainFile {
    toolchain: Toolchain,
}

#[derive(Deserialize)]
struct Toolchain {
    channel: String,
}

/// The compiler that is pinned is the one that the manifests promise.
pub(super) fn check_toolchain(root: &Path, findings: &mut Findings) -> Result<()> {
    let pin = std::fs::read_to_string(root.join("rust-toolchain.toml")).context("rust-toolchain.toml")?;
    let pin: ToolchainFile = toml::from_str(&pin).context("rust-toolchain.toml")?;
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).context("Cargo.toml")?;
    let manifest: toml::Table = toml::from_str(&manifest).context("Cargo.toml")?;
    let promised = manifest
        .get("workspace")
        .and_then(|workspace| workspace.get("package"))
        .and_then(|package| package.get("rust-version"))
        .and_then(|version| version.as_str())
        .unwrap_or_default();
    if !is_pin_of(&pin.toolchain.channel, promised) {
        findings.problems.push(format!(
            "rust-toolchain.toml pins {}, Cargo.toml promises rust-version {promised:?}: make them one release",
            pin.toolchain.channel
        ));
    }
    Ok(())
}

/// `1.95.0` is a pin of `1.95`; a bare `1.95` or `stable` pins nothing.
fn is_pin_of(channel: &str, promised: &str) -> bool {
    !promised.is_empty()
        && channel.split('.').count() == 3
        && (channel == promised || channel.starts_with(&format!("{promised}.")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(from: &str, to: &str, to_member: bool, in_tests: bool) -> usize {
        let mut findings = Findings::default();
        check_edge(
            &Edge {
                from,
                to,
                to_member,
                in_tests,
            },
            &mut findings,
        );
        findings.problems.len()
    }

    #[test]
    fn components_do_not_depend_on_each_other() {
        assert_eq!(problems("forewarm-adapter", "forewarm-exporter", true, false), 1);
        assert_eq!(problems("forewarm-adapter", "forewarm-exporter", true, true), 1);
        assert_eq!(problems("forewarm-exporter", "forewarm-adapter", true, false), 1);
        assert_eq!(problems("forewarm-runtime", "forewarm-nvml", true, false), 1);
        assert_eq!(problems("forewarm-adapter", "forewarm-runtime", true, false), 0);
        assert_eq!(problems("forewarm-tests", "forewarm-adapter", true, false), 0);
    }

    #[test]
    fn the_fake_is_for_tests_only() {
        assert_eq!(problems("forewarm-nvml", "forewarm-fake-nvml", true, true), 0);
        assert_eq!(problems("forewarm-nvml", "forewarm-fake-nvml", true, false), 1);
    }

    #[test]
    fn promises_about_outside_crates_hold() {
        assert_eq!(problems("forewarm-signals", "tokio", false, false), 1);
        assert_eq!(problems("forewarm-signals", "tokio-util", false, false), 1);
        assert_eq!(problems("forewarm-signals", "serde", false, false), 0);
        assert_eq!(problems("forewarm-exporter", "nvml-wrapper-sys", false, false), 1);
        assert_eq!(problems("forewarm-exporter", "tonic", false, false), 0);
    }

    #[test]
    fn a_new_member_needs_a_decision() {
        let mut findings = Findings::default();
        check_member("forewarm-placer", &mut findings);
        check_member("forewarm-adapter", &mut findings);
        assert_eq!(findings.problems.len(), 1);
    }

    #[test]
    fn the_pin_is_exact() {
        assert!(is_pin_of("1.95.0", "1.95"));
        assert!(!is_pin_of("1.96.0", "1.95"));
        assert!(!is_pin_of("1.95", "1.95"));
        assert!(!is_pin_of("stable", "1.95"));
        assert!(!is_pin_of("1.95.0", ""));
    }

    #[test]
    fn lints_are_inherited() {
        assert!(inherits_lints("[package]\n[lints]\nworkspace = true\n"));
        assert!(!inherits_lints("[package]\n[lints]\nrust = {}\n"));
        assert!(!inherits_lints("[package]\n"));
    }
}
