//! `once` as its own process over the stand-in driver.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test binary: helpers fail the test they serve"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use forewarm_fake_nvml::library;
use forewarm_fake_nvml::settings::Settings;

fn library(folder: &Path) -> PathBuf {
    let settings = Settings {
        profile: Some("t4".to_owned()),
        driver: Some("535.183.06".to_owned()),
        call_cost_us: Some(0),
        ..Settings::default()
    };
    let cdylib = std::env::current_exe()
        .unwrap()
        .with_file_name("libforewarm_fake_nvml.so");
    library::prepare_with(&cdylib, folder, &settings, &[]).unwrap()
}

fn once(folder: &Path, library: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forewarm-exporter"))
        .args(["--interval", "100ms", "--nvml-library"])
        .arg(library)
        .arg("--kubelet-dir")
        .arg(folder)
        .arg("once")
        .env_clear()
        .output()
        .unwrap()
}

#[test]
fn once_ends_its_tasks_without_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let output = once(folder.path(), &library(folder.path()));
    let logs = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{logs}");
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.contains("gpu_up{"), "{page}");
    assert!(
        !logs.contains("task ended") && !logs.contains("task failed"),
        "{logs}"
    );
}

#[test]
fn once_without_a_driver_fails_with_the_reason_alone() {
    let folder = tempfile::tempdir().unwrap();
    let output = once(folder.path(), Path::new("/nonexistent/libnvidia-ml.so.1"));
    let logs = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{logs}");
    assert!(
        logs.contains("error: no driver: ") && logs.contains("/nonexistent"),
        "{logs}"
    );
    assert!(
        !logs.contains("task ended") && !logs.contains("task failed"),
        "{logs}"
    );
}
