//! What must and must not stand in a file.
//!
//! Inputs: a path relative to the root and the file's text. Invariants: generated folders are exempt from the
//! rules about writing, not from the rules about leaks of machines and hosts.

use super::Findings;

/// Lines up to the tests: from here on a file should be split.
const WARN_LINES: usize = 400;
/// Lines up to the tests: nobody reads this at once.
const MOST_LINES: usize = 800;
/// Tests longer than this hide the code above them: they move to a sibling `tests.rs`.
const MOST_TEST_LINES: usize = 300;

/// Members whose promise is to hold all unsafe code.
const MAY_BE_UNSAFE: [&str; 2] = ["exporter/nvml/", "tests/fake-nvml/"];
/// Files that name hosts because that is their format, and this file.
const MAY_NAME_HOSTS: [&str; 5] = ["Cargo.lock", "go.sum", "go.mod", "deny.toml", "tidy/source.rs"];
/// Hosts of registries and mirrors: users choose theirs, so none may be built in.
const HOSTS: [&str; 8] = [
    "docker.io",
    "ghcr.io",
    "quay.io",
    "gcr.io",
    "nvcr.io",
    "registry.k8s.io",
    "index.crates.io",
    "proxy.golang.org",
];
/// Folders of somebody's machine.
const MACHINE_FOLDERS: [&str; 3] = ["/root/", "/work/", "/Users/"];

/// Checks one file.
pub(super) fn check(path: &str, text: &str, findings: &mut Findings) {
    check_leaks(path, text, findings);
    if !path.ends_with(".rs") || path.contains("/generated/") {
        return;
    }
    check_head(path, text, findings);
    check_length(path, text, findings);
    check_words(path, text, findings);
}

fn check_leaks(path: &str, text: &str, findings: &mut Findings) {
    if MAY_NAME_HOSTS.iter().any(|exempt| path.ends_with(exempt)) {
        return;
    }
    for (number, line) in numbered(text) {
        if let Some(host) = HOSTS.iter().find(|host| line.contains(**host)) {
            findings.problems.push(format!(
                "{path}:{number}: names the host {host}; leave the choice to the user"
            ));
        }
        if let Some(folder) = MACHINE_FOLDERS.iter().find(|folder| line.contains(**folder)) {
            findings.problems.push(format!(
                "{path}:{number}: names a folder of one machine ({folder})"
            ));
        }
    }
}

fn check_head(path: &str, text: &str, findings: &mut Findings) {
    let first = text
        .lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or_default();
    if !first.starts_with("//! ") {
        findings.problems.push(format!(
            "{path}: begin with `//!`: purpose, inputs, invariants of the module"
        ));
    }
}

fn check_length(path: &str, text: &str, findings: &mut Findings) {
    // Integration tests lie in a `tests` folder below a member; the first folder is the testbed's member.
    if path.ends_with("/tests.rs") || path.contains("/tests/") {
        return;
    }
    let total = text.lines().count();
    let code = text
        .lines()
        .position(|line| line.trim() == "#[cfg(test)]")
        .unwrap_or(total);
    if code > MOST_LINES {
        findings.problems.push(format!(
            "{path}: {code} lines, at most {MOST_LINES}: split it by subject"
        ));
    } else if code > WARN_LINES {
        findings
            .warnings
            .push(format!("{path}: {code} lines, better at most {WARN_LINES}"));
    }
    if total - code > MOST_TEST_LINES {
        findings.warnings.push(format!(
            "{path}: {} lines of tests, better in a sibling tests.rs from {MOST_TEST_LINES} on",
            total - code
        ));
    }
}

fn check_words(path: &str, text: &str, findings: &mut Findings) {
    let is_this_file = path.ends_with("tidy/source.rs");
    for (number, line) in numbered(text) {
        let comment = line.split_once("//").map_or("", |(_, comment)| comment);
        if !is_this_file && ["TODO", "FIXME", "XXX"].iter().any(|mark| comment.contains(mark)) {
            findings.problems.push(format!(
                "{path}:{number}: do it, or file it: marks in code are forgotten"
            ));
        }
        if line.contains("allow(unsafe_code")
            && !MAY_BE_UNSAFE.iter().any(|member| path.starts_with(member))
            && !is_this_file
        {
            findings.problems.push(format!(
                "{path}:{number}: unsafe code belongs to {}",
                MAY_BE_UNSAFE.join(" and ")
            ));
        }
        if line.contains("#[should_panic") && !is_this_file {
            findings
                .problems
                .push(format!("{path}:{number}: assert on an error instead of a panic"));
        }
    }
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Findings {
        let mut findings = Findings::default();
        check(path, text, &mut findings);
        findings
    }

    fn lines(code: usize, tests: usize) -> String {
        let test_mark = if tests > 0 { "#[cfg(test)]\n" } else { "" };
        format!(
            "//! Head.\n{}{test_mark}{}",
            "\n".repeat(code - 1),
            "\n".repeat(tests.saturating_sub(1))
        )
    }

    #[test]
    fn every_module_has_a_head() {
        assert!(findings("a/src/b.rs", "//! Purpose.\n").problems.is_empty());
        assert_eq!(findings("a/src/b.rs", "use x;\n//! late\n").problems.len(), 1);
        assert_eq!(findings("a/src/b.rs", "").problems.len(), 1);
        assert!(findings("a/src/generated/b.rs", "use x;\n").problems.is_empty());
    }

    #[test]
    fn the_budget_counts_up_to_the_tests() {
        assert!(findings("a.rs", &lines(400, 100)).warnings.is_empty());
        assert_eq!(findings("a.rs", &lines(401, 0)).warnings.len(), 1);
        assert_eq!(findings("a.rs", &lines(801, 0)).problems.len(), 1);
        assert!(findings("a.rs", &lines(300, 700)).problems.is_empty());
        assert_eq!(findings("a.rs", &lines(300, 700)).warnings.len(), 1);
        assert!(findings("a/tests.rs", &lines(900, 0)).problems.is_empty());
        assert!(
            findings("tests/tests/apiserver_x.rs", &lines(900, 0))
                .problems
                .is_empty()
        );
        assert_eq!(findings("tests/src/x.rs", &lines(900, 0)).problems.len(), 1);
        assert!(findings("a/generated/x.rs", &lines(2000, 0)).problems.is_empty());
    }

    #[test]
    fn unfinished_work_is_refused() {
        assert_eq!(findings("a.rs", "//! Head.\n// TODO: later\n").problems.len(), 1);
        assert!(
            findings("a.rs", "//! Head.\nlet todos = \"TODO\";\n")
                .problems
                .is_empty()
        );
        assert_eq!(findings("a.rs", "//! Head.\n#[should_panic]\n").problems.len(), 1);
    }

    #[test]
    fn unsafe_code_stays_in_its_members() {
        let text = "//! Head.\n#![allow(unsafe_code, reason = \"ffi\")]\n";
        assert_eq!(findings("adapter/src/lib.rs", text).problems.len(), 1);
        assert!(findings("exporter/nvml/src/lib.rs", text).problems.is_empty());
    }

    #[test]
    fn machines_and_hosts_do_not_leak() {
        assert_eq!(findings("a.md", "image: ghcr.io/x/y\n").problems.len(), 1);
        assert_eq!(findings("a.md", "cd /root/x\n").problems.len(), 1);
        assert!(findings("a.md", "image: forewarm/exporter\n").problems.is_empty());
        assert!(findings("Cargo.lock", "index.crates.io\n").problems.is_empty());
    }
}
