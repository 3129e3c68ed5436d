//! NVIDIA's own Go client walks every model under every driver level.
//!
//! The walker is `tests/gonvml`. `FOREWARM_GO_NVML` names a built one (`cargo xtask` builds it into the cache); without
//! it the test builds one itself, or skips loudly where Go or a C compiler is missing.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]

mod support;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use forewarm_fake_nvml::control::{MigControl, MigDeviceControl, Process};
use forewarm_fake_nvml::profile::{BUILT_IN, Profile};
use forewarm_fake_nvml::settings::Settings;
use support::Fake;

const DRIVERS: [&str; 7] = [
    "470.256.02",
    "510.108.03",
    "535.183.06",
    "550.127.05",
    "570.133.20",
    "580.65.06",
    "580.95.05",
];

/// Getters that succeed on every model under every driver.
const ALWAYS: [&str; 12] = [
    "GetBAR1MemoryInfo",
    "GetComputeRunningProcesses",
    "GetCudaComputeCapability",
    "GetFieldValues",
    "GetIndex",
    "GetMemoryInfo",
    "GetMinorNumber",
    "GetName",
    "GetPciInfo",
    "GetPerformanceState",
    "GetUUID",
    "GetUtilizationRates",
];

/// Why there is no walker.
fn missing(program: &str) -> Option<String> {
    let runs = Command::new(program).arg("--help").output();
    runs.err().map(|cause| format!("{program}: {cause}"))
}

/// The walker: the one named, or one that is built here from pinned modules.
fn walker(folder: &Path) -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("FOREWARM_GO_NVML") {
        return Ok(named.into());
    }
    if let Some(why) = missing("go").or_else(|| missing("cc")) {
        return Err(why);
    }
    let program = folder.join("gonvml");
    let built = Command::new("go")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../gonvml"))
        .args(["build", "-o"])
        .arg(&program)
        .arg(".")
        .envs([
            ("CGO_ENABLED", "1"),
            // Go would look for gcc by that name.
            ("CC", "cc"),
            // The client binds every symbol that a header ever had.
            ("CGO_CFLAGS", "-O1 -Wno-deprecated-declarations"),
        ])
        .output()
        .map_err(|cause| cause.to_string())?;
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    Ok(program)
}

/// Two GPUs at work; with MIG, the first one is cut up, with a hole and an empty instance.
fn fake(name: &str, driver: &str) -> Fake {
    let mut fake = Fake::new(Settings {
        profile: Some(name.into()),
        driver: Some(driver.into()),
        gpus: Some(2),
        ..Settings::default()
    });
    let profile = Profile::load(name).unwrap();
    fake.set(|control| {
        control.privileged = true;
        for index in 0..2 {
            let gpu = control.gpu(index);
            gpu.accounting = true;
            gpu.nvlink_tx_bytes_per_second = Some(1e9);
            gpu.processes = vec![Process {
                pid: 4_242,
                sm: 0.4,
                memory_bytes: 1 << 30,
                ..Process::default()
            }];
        }
        let table = |slices: u32| {
            let mut rows = profile.mig_profiles.iter();
            rows.find(|row| row.slices == slices).map(|row| row.name.clone())
        };
        if let (Some(one), Some(three)) = (table(1), table(3)) {
            let device = |gi, index, profile: &str| MigDeviceControl {
                gi,
                ci: Some(0),
                index: Some(index),
                profile: profile.to_owned(),
                busy: Some(0.5),
                ..MigDeviceControl::default()
            };
            control.gpu(0).processes.clear();
            control.gpu(0).mig = Some(MigControl {
                devices: vec![
                    device(2, 0, &three),
                    device(9, 3, &one),
                    MigDeviceControl {
                        ci: None,
                        ..device(10, 0, &one)
                    },
                ],
                ..MigControl::default()
            });
        }
    });
    fake
}

/// Walks one fake; what the walker found.
fn walk(walker: &Path, fake: &Fake) -> serde_json::Value {
    let output = Command::new(walker).arg(&fake.library).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|cause| {
        panic!(
            "{cause}: {} {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
    });
    assert!(
        output.status.success(),
        "{}",
        serde_json::to_string_pretty(&report["complaints"]).unwrap()
    );
    report
}

#[test]
fn the_go_client_walks_every_model_under_every_driver_without_complaint() {
    let folder = tempfile::tempdir().unwrap();
    let walker = match walker(folder.path()) {
        Ok(walker) => walker,
        Err(why) => {
            // The runner counts this line; nothing to do if stderr is closed.
            _ = writeln!(io::stderr(), "skipped: the_go_client_walks_every_model ({why})");
            return;
        }
    };
    for name in BUILT_IN {
        let profile = Profile::load(name).unwrap();
        for driver in DRIVERS {
            let report = walk(&walker, &fake(name, driver));
            let context = format!("{name} {driver}");
            assert_eq!(report["driver"], *driver, "{context}");
            let listed = |key: &str| -> Vec<String> {
                let list = report[key].as_array().unwrap().iter();
                list.map(|item| item.as_str().unwrap().to_owned()).collect()
            };
            let answered = listed("answered");
            for getter in ALWAYS {
                assert!(
                    answered.iter().any(|known| known == getter),
                    "{context}: {getter}"
                );
            }
            let answers = |getter: &str| answered.iter().any(|known| known == getter);
            let major: u32 = driver[..3].parse().unwrap();
            assert_eq!(report["mig"], if profile.mig { 2 } else { 0 }, "{context}");
            assert_eq!(answers("GpmMetricsGet"), profile.gpm && major >= 525, "{context}");
            assert_eq!(
                answers("GetPlatformInfo"),
                profile.platform.is_some() && major >= 560,
                "{context}"
            );
            assert_eq!(answers("GetEccMode"), profile.ecc.supported, "{context}");
            assert_eq!(answers("SystemEventSetCreate"), major >= 580, "{context}");
            assert_eq!(answers("GetNvLinkState"), profile.nvlink.is_some(), "{context}");
        }
    }
}
