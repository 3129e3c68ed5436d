//! GPM under MIG: by GPU instance, and never over two of them.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "samples of instances are taken with raw calls only; pointers are to locals of the right type"
)]

mod support;

use std::ptr::null_mut;

use forewarm_fake_nvml::control::{MigControl, MigDeviceControl};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::*;
use support::Fake;

const INVALID_ARGUMENT: u32 = 2;
const NO_DATA: u32 = 21;

fn device(gi: u32, profile: &str) -> MigDeviceControl {
    MigDeviceControl {
        gi,
        ci: Some(0),
        profile: profile.to_owned(),
        ..MigDeviceControl::default()
    }
}

fn layout(devices: Vec<MigDeviceControl>) -> Option<MigControl> {
    Some(MigControl {
        devices,
        ..MigControl::default()
    })
}

#[test]
fn gpm_is_taken_of_each_gpu_instance() {
    let mut fake = Fake::virtual_time();
    let busy = |gi, share| MigDeviceControl {
        sm_active: Some(share),
        ..device(gi, "1g.10gb")
    };
    fake.set(|control| {
        control.now_ms = Some(1_000);
        control.gpu(0).mig = layout(vec![
            busy(7, 0.8),
            busy(8, 0.2),
            MigDeviceControl {
                ci: None,
                ..device(1, "3g.40gb")
            },
        ]);
    });
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    gpu.power_usage().unwrap();
    let mut at = 2_000;
    let mut step = |fake: &mut Fake| {
        at += 1_000;
        fake.set(|control| control.now_ms = Some(at));
        gpu.power_usage().unwrap();
    };
    step(&mut fake);
    let lib = nvml.lib();
    // SAFETY: out pointers are to locals; tokens are checked by the library.
    unsafe {
        let mut samples: [[nvmlGpmSample_t; 2]; 3] = [[null_mut(); 2]; 3];
        for sample in samples.iter_mut().flatten() {
            assert_eq!(lib.nvmlGpmSampleAlloc(sample), 0);
        }
        let mig = gpu.mig_device_by_index(1).unwrap();
        let [[first, second], [third, fourth], [never, _]] = samples;
        for (whole, through_handle) in [(first, third), (second, fourth)] {
            assert_eq!(lib.nvmlGpmMigSampleGet(gpu.handle(), 7, whole), 0);
            assert_eq!(lib.nvmlGpmSampleGet(mig.handle(), through_handle), 0);
            assert_eq!(lib.nvmlGpmMigSampleGet(gpu.handle(), 1, never), NO_DATA);
            assert_eq!(lib.nvmlGpmMigSampleGet(gpu.handle(), 5, never), INVALID_ARGUMENT);
            step(&mut fake);
        }
        let sm = |from, to| {
            let mut request: nvmlGpmMetricsGet_t = std::mem::zeroed();
            (request.version, request.numMetrics) = (1, 1);
            (request.sample1, request.sample2) = (from, to);
            request.metrics[0].metricId = 2;
            let code = lib.nvmlGpmMetricsGet(&raw mut request);
            (code, request.metrics[0].value.round() as i64)
        };
        assert_eq!(sm(first, second), (0, 80));
        assert_eq!(sm(third, fourth), (0, 20));
        assert_eq!(sm(first, fourth).0, INVALID_ARGUMENT, "two instances");
    }
}

#[test]
fn a_mean_over_an_instance_that_was_made_anew_is_refused() {
    let mut fake = Fake::virtual_time();
    let step = |fake: &mut Fake, at: u64, profile: &str| {
        let mig = layout(vec![MigDeviceControl {
            busy: Some(0.5),
            ..device(2, profile)
        }]);
        fake.set(|control| {
            control.now_ms = Some(at);
            control.gpu(0).mig = mig;
        });
    };
    step(&mut fake, 1_000, "3g.40gb");
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    gpu.power_usage().unwrap();
    step(&mut fake, 9_000, "3g.40gb");
    let before = sample_of(&nvml, &gpu, 2);
    step(&mut fake, 10_000, "2g.20gb");
    gpu.power_usage().unwrap();
    step(&mut fake, 11_000, "2g.20gb");
    let after = sample_of(&nvml, &gpu, 2);
    // SAFETY: plain C data; tokens are checked by the library.
    let code = unsafe {
        let mut request: nvmlGpmMetricsGet_t = std::mem::zeroed();
        (request.version, request.numMetrics) = (1, 1);
        (request.sample1, request.sample2) = (before, after);
        request.metrics[0].metricId = 2;
        nvml.lib().nvmlGpmMetricsGet(&raw mut request)
    };
    assert_eq!(code, INVALID_ARGUMENT);
}

/// A raw GPM sample of a GPU instance.
fn sample_of(nvml: &Nvml, gpu: &Device<'_>, gi: u32) -> nvmlGpmSample_t {
    let mut sample = null_mut();
    // SAFETY: an out pointer to a local; the token is checked by the library.
    unsafe {
        assert_eq!(nvml.lib().nvmlGpmSampleAlloc(&raw mut sample), 0);
        assert_eq!(nvml.lib().nvmlGpmMigSampleGet(gpu.handle(), gi, sample), 0);
    }
    sample
}
