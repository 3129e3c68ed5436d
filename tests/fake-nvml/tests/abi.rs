//! The rules of the C interface, asked for with raw calls: handles, version words, sizes, strings, life cycle.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "raw calls are what is tested; pointers are to locals of the right type"
)]

mod support;

use std::ffi::{CStr, c_char, c_uint};
use std::ptr::{null, null_mut};

use forewarm_fake_nvml::control::{Process, RetiredPages};
use forewarm_fake_nvml::gpu_uuid;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings::*;
use support::Fake;

const INVALID_ARGUMENT: u32 = 2;
const INSUFFICIENT_SIZE: u32 = 7;
const VERSION_MISMATCH: u32 = 25;

fn device(nvml: &Nvml, index: u32) -> nvmlDevice_t {
    // SAFETY: the handle is used while `nvml` lives.
    unsafe { nvml.device_by_index(index).unwrap().handle() }
}

fn word<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap() | (version << 24)
}

/// A zeroed plain C struct.
fn zeroed<T: Copy>() -> T {
    // SAFETY: used for NVML's structs only: integers, floats and raw pointers.
    unsafe { std::mem::zeroed() }
}

#[test]
fn an_unknown_handle_is_refused() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let mut local = 0_u64;
    let inside = device(&nvml, 0).wrapping_byte_add(1);
    let beyond = device(&nvml, 7).wrapping_byte_add(8);
    for handle in [null_mut(), (&raw mut local).cast(), inside, beyond] {
        let mut rates = nvmlUtilization_t { gpu: 7, memory: 7 };
        // SAFETY: valid out pointer; the handle is what is tested.
        assert_eq!(
            unsafe { nvml.lib().nvmlDeviceGetUtilizationRates(handle, &raw mut rates) },
            INVALID_ARGUMENT
        );
        assert_eq!(rates.gpu, 7, "nothing is written");
    }
    assert_ne!(device(&nvml, 0), device(&nvml, 1));
    assert!(!device(&nvml, 0).is_null());
}

#[test]
fn null_pointers_are_refused() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    // SAFETY: null is what is tested.
    unsafe {
        assert_eq!(lib.nvmlDeviceGetCount_v2(null_mut()), INVALID_ARGUMENT);
        assert_eq!(
            lib.nvmlDeviceGetUtilizationRates(gpu, null_mut()),
            INVALID_ARGUMENT
        );
        assert_eq!(lib.nvmlDeviceGetMemoryInfo_v2(gpu, null_mut()), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlDeviceGetName(gpu, null_mut(), 96), INVALID_ARGUMENT);
        assert_eq!(
            lib.nvmlDeviceGetHandleByUUID(null(), &mut gpu.clone()),
            INVALID_ARGUMENT
        );
        assert_eq!(lib.nvmlDeviceGetFieldValues(gpu, 1, null_mut()), INVALID_ARGUMENT);
        assert_eq!(
            lib.nvmlDeviceGetFieldValues(gpu, -1, &mut zeroed()),
            INVALID_ARGUMENT
        );
        assert_eq!(
            lib.nvmlDeviceGetComputeRunningProcesses_v3(gpu, null_mut(), null_mut()),
            INVALID_ARGUMENT
        );
        assert_eq!(lib.nvmlGpmSampleAlloc(null_mut()), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlGpmMetricsGet(null_mut()), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlEventSetCreate(null_mut()), INVALID_ARGUMENT);
        assert_eq!(
            lib.nvmlEventSetWait_v2(null_mut(), null_mut(), 0),
            INVALID_ARGUMENT
        );
    }
}

#[test]
fn a_wrong_version_word_is_refused_and_the_right_one_answered() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    macro_rules! versioned {
        ($call:ident, $type:ty, $version:expr, $right:expr) => {
            let mut info: $type = zeroed();
            for wrong in [
                0,
                $version,
                word::<$type>($version) + 8,
                word::<$type>($version + 1),
            ] {
                info.version = wrong;
                // SAFETY: valid out pointer.
                assert_eq!(
                    unsafe { lib.$call(gpu, (&raw mut info).cast()) },
                    VERSION_MISMATCH,
                    stringify!($call)
                );
            }
            info.version = word::<$type>($version);
            // SAFETY: as above.
            assert_eq!(
                unsafe { lib.$call(gpu, (&raw mut info).cast()) },
                $right,
                stringify!($call)
            );
        };
    }
    versioned!(nvmlDeviceGetMemoryInfo_v2, nvmlMemory_v2_t, 2, 0);
    versioned!(
        nvmlDeviceGetProcessesUtilizationInfo,
        nvmlProcessesUtilizationInfo_t,
        1,
        6
    );
    versioned!(nvmlDeviceGetTemperatureV, nvmlTemperature_t, 1, 0);
    versioned!(nvmlDeviceGetMarginTemperature, nvmlMarginTemperature_t, 1, 0);
    versioned!(nvmlDeviceGetSramEccErrorStatus, nvmlEccSramErrorStatus_t, 1, 0);
    versioned!(nvmlDeviceGetGpuFabricInfoV, nvmlGpuFabricInfo_v3_t, 3, 0);
    versioned!(nvmlDeviceGetPlatformInfo, nvmlPlatformInfo_v2_t, 2, 3);

    let mut support = nvmlGpmSupport_t {
        version: 2,
        isSupportedDevice: 9,
    };
    // SAFETY: valid out pointer.
    assert_eq!(
        unsafe { lib.nvmlGpmQueryDeviceSupport(gpu, &raw mut support) },
        VERSION_MISMATCH
    );
    let mut request: nvmlGpmMetricsGet_t = zeroed();
    // SAFETY: valid pointer.
    assert_eq!(
        unsafe { lib.nvmlGpmMetricsGet(&raw mut request) },
        VERSION_MISMATCH
    );
}

#[test]
fn fabric_info_is_answered_in_the_layout_that_was_asked_for() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        let fabric = control.gpu(0).fabric.get_or_insert_default();
        fabric.cluster_uuid = Some("00112233-4455-6677-8899-aabbccddeeff".into());
        fabric.clique = Some(4);
        fabric.health_summary = Some(2);
    });
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    let mut v3: nvmlGpuFabricInfo_v3_t = zeroed();
    v3.version = word::<nvmlGpuFabricInfo_v3_t>(3);
    // SAFETY: valid out pointer.
    assert_eq!(unsafe { lib.nvmlDeviceGetGpuFabricInfoV(gpu, &raw mut v3) }, 0);
    assert_eq!(
        (v3.state, v3.cliqueId, v3.healthSummary, v3.clusterUuid[15]),
        (3, 4, 2, 0xff)
    );

    // The second layout is shorter: what lies behind it stays untouched.
    let mut v2: nvmlGpuFabricInfo_v3_t = zeroed();
    v2.version = word::<nvmlGpuFabricInfo_v2_t>(2);
    v2.healthSummary = 99;
    // SAFETY: a v3 struct has room for v2.
    assert_eq!(unsafe { lib.nvmlDeviceGetGpuFabricInfoV(gpu, &raw mut v2) }, 0);
    assert_eq!((v2.state, v2.cliqueId, v2.healthSummary), (3, 4, 99));

    // A driver from before the third layout refuses it by its version word.
    let older = Fake::driver("550.127.05");
    let older = older.nvml();
    // SAFETY: valid out pointers; a v3 struct has room for v2.
    unsafe {
        let (lib, gpu) = (older.lib(), device(&older, 0));
        assert_eq!(
            lib.nvmlDeviceGetGpuFabricInfoV(gpu, &raw mut v3),
            VERSION_MISMATCH
        );
        assert_eq!(lib.nvmlDeviceGetGpuFabricInfoV(gpu, &raw mut v2), 0);
    }
}

#[test]
fn lists_are_sized_in_two_phases() {
    let mut fake = Fake::t4();
    fake.set(|control| {
        let gpu = control.gpu(0);
        gpu.processes = (1..=3)
            .map(|pid| Process {
                pid,
                sm: 0.2,
                memory_bytes: 1 << 20,
                ..Process::default()
            })
            .collect();
        gpu.retired_pages = Some(RetiredPages {
            double_bit: 2,
            ..RetiredPages::default()
        });
    });
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    let mut infos: [nvmlProcessInfo_t; 4] = [zeroed(); 4];
    let ask = |capacity: c_uint, array: *mut nvmlProcessInfo_t| {
        let mut count = capacity;
        // SAFETY: the array holds at least `capacity` items.
        let code = unsafe { lib.nvmlDeviceGetComputeRunningProcesses_v3(gpu, &raw mut count, array) };
        (code, count)
    };
    assert_eq!(ask(0, null_mut()), (INSUFFICIENT_SIZE, 3));
    assert_eq!(ask(2, infos.as_mut_ptr()), (INSUFFICIENT_SIZE, 3));
    assert_eq!(infos[0].pid, 0, "a short buffer is not written");
    assert_eq!(ask(4, infos.as_mut_ptr()), (0, 3));
    assert_eq!(infos.map(|info| info.pid), [1, 2, 3, 0]);
    assert_eq!(infos[0].gpuInstanceId, u32::MAX);

    let mut count = 0;
    // SAFETY: sizing calls write the count only.
    unsafe {
        assert_eq!(
            lib.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu, &raw mut count, null_mut()),
            0
        );
        assert_eq!(count, 0, "an empty list is success");
        let code = lib.nvmlDeviceGetRetiredPages_v2(gpu, 1, &raw mut count, null_mut(), null_mut());
        assert_eq!((code, count), (INSUFFICIENT_SIZE, 2));
        let (mut addresses, mut times) = ([0; 2], [0; 2]);
        let code = lib.nvmlDeviceGetRetiredPages_v2(
            gpu,
            1,
            &raw mut count,
            addresses.as_mut_ptr(),
            times.as_mut_ptr(),
        );
        assert_eq!((code, count), (0, 2));
        assert!(addresses[0] != addresses[1] && times.iter().all(|time| *time > 0));
    }
}

#[test]
fn process_utilisation_is_sized_in_two_phases() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(50_000);
        control.gpu(0).processes = (1..=3)
            .map(|pid| Process {
                pid,
                sm: 0.2,
                ..Process::default()
            })
            .collect();
    });
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    fake.set(|control| control.now_ms = Some(55_000));
    let mut info: nvmlProcessesUtilizationInfo_t = zeroed();
    info.version = word::<nvmlProcessesUtilizationInfo_t>(1);
    // SAFETY: no array yet, so only the count is written.
    assert_eq!(
        unsafe { lib.nvmlDeviceGetProcessesUtilizationInfo(gpu, &raw mut info) },
        INSUFFICIENT_SIZE
    );
    assert_eq!(info.processSamplesCount, 3);
    let mut samples: [nvmlProcessUtilizationInfo_v1_t; 3] = [zeroed(); 3];
    info.procUtilArray = samples.as_mut_ptr();
    // SAFETY: the array holds the count.
    assert_eq!(
        unsafe { lib.nvmlDeviceGetProcessesUtilizationInfo(gpu, &raw mut info) },
        0
    );
    assert!(
        samples
            .iter()
            .all(|sample| sample.smUtil == 20 && sample.timeStamp > 50_000_000)
    );
    info.lastSeenTimeStamp = 55_000_000;
    // SAFETY: as above.
    assert_eq!(
        unsafe { lib.nvmlDeviceGetProcessesUtilizationInfo(gpu, &raw mut info) },
        6,
        "idle is NOT_FOUND"
    );
}

#[test]
fn strings_fit_with_their_nul_or_not_at_all() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    let uuid = gpu_uuid("forewarm", 0);
    let length = u32::try_from(uuid.len()).unwrap();
    let mut buffer = [0x7f as c_char; 96];
    // SAFETY: the buffer is longer than every length passed.
    unsafe {
        assert_eq!(
            lib.nvmlDeviceGetUUID(gpu, buffer.as_mut_ptr(), length),
            INSUFFICIENT_SIZE
        );
        assert_eq!(buffer[0], 0x7f, "nothing is written");
        assert_eq!(lib.nvmlDeviceGetUUID(gpu, buffer.as_mut_ptr(), length + 1), 0);
        assert_eq!(CStr::from_ptr(buffer.as_ptr()).to_str().unwrap(), uuid);
        assert_eq!(buffer[uuid.len() + 1], 0x7f, "nothing is written past the NUL");
        assert_eq!(
            CStr::from_ptr(lib.nvmlErrorString(15)).to_str().unwrap(),
            "GPU is lost"
        );
        assert_eq!(
            CStr::from_ptr(lib.nvmlErrorString(4711)).to_str().unwrap(),
            "Unknown Error"
        );
    }
}

#[test]
fn init_is_counted_per_process() {
    let fake = Fake::h100();
    // SAFETY: loading the fake runs no code of its own; calls below pass valid pointers.
    unsafe {
        let lib = NvmlLib::new(&fake.library).unwrap();
        let mut count = 0;
        assert_eq!(lib.nvmlDeviceGetCount_v2(&raw mut count), 1, "uninitialised");
        assert_eq!(lib.nvmlShutdown(), 1);
        assert_eq!(lib.nvmlInit_v2(), 0);
        assert_eq!(lib.nvmlInitWithFlags(1), 0);
        assert_eq!(lib.nvmlInitWithFlags(0x80), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlShutdown(), 0);
        assert_eq!(lib.nvmlDeviceGetCount_v2(&raw mut count), 0);
        assert_eq!(count, 8);
        assert_eq!(lib.nvmlShutdown(), 0);
        assert_eq!(lib.nvmlDeviceGetCount_v2(&raw mut count), 1);
        assert_eq!(lib.nvmlInit_v2(), 0, "and again");
        assert_eq!(lib.nvmlShutdown(), 0);
    }
}

#[test]
fn freed_samples_and_sets_are_unknown() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    // SAFETY: tokens are checked by the library, not followed.
    unsafe {
        let mut sample = null_mut();
        assert_eq!(lib.nvmlGpmSampleAlloc(&raw mut sample), 0);
        assert!(!sample.is_null());
        assert_eq!(lib.nvmlGpmSampleGet(gpu, sample), 0);
        assert_eq!(lib.nvmlGpmSampleFree(sample), 0);
        assert_eq!(lib.nvmlGpmSampleFree(sample), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlGpmSampleGet(gpu, sample), INVALID_ARGUMENT);

        let (mut set, mut data) = (null_mut(), zeroed());
        assert_eq!(lib.nvmlEventSetCreate(&raw mut set), 0);
        assert_eq!(lib.nvmlDeviceRegisterEvents(gpu, 8, set), 0);
        assert_eq!(
            lib.nvmlDeviceRegisterEvents(gpu, 1 << 40, set),
            3,
            "no such event"
        );
        assert_eq!(lib.nvmlEventSetFree(set), 0);
        assert_eq!(lib.nvmlEventSetFree(set), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlEventSetWait_v2(set, &raw mut data, 0), INVALID_ARGUMENT);
    }
}

#[test]
fn gpm_writes_no_further_than_the_client_said() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    // A client built with another header has another array length: here two metrics, then a canary.
    #[repr(C)]
    struct Short {
        version: c_uint,
        count: c_uint,
        samples: [nvmlGpmSample_t; 2],
        metrics: [nvmlGpmMetric_t; 2],
        canary: [u64; 16],
    }
    // SAFETY: plain C data.
    let mut request: Short = unsafe { std::mem::zeroed() };
    request.canary = [0x5a5a; 16];
    // SAFETY: the library touches `count` metrics only, which is what is tested.
    unsafe {
        for sample in &mut request.samples {
            assert_eq!(lib.nvmlGpmSampleAlloc(sample), 0);
        }
        (request.version, request.count) = (1, 2);
        let call = lib.nvmlGpmMetricsGet.as_ref().unwrap();
        assert_eq!(
            call((&raw mut request).cast()),
            INVALID_ARGUMENT,
            "samples are empty"
        );
        for sample in request.samples {
            assert_eq!(lib.nvmlGpmSampleGet(gpu, sample), 0);
        }
        (request.metrics[0].metricId, request.metrics[1].metricId) = (2, 100);
        assert_eq!(call((&raw mut request).cast()), 0);
        assert_eq!(request.canary, [0x5a5a; 16]);
        assert_eq!(request.metrics[0].nvmlReturn, 0);
        assert_eq!(request.metrics[1].nvmlReturn, 3, "no C2C on this board");
        let other = device(&nvml, 1);
        assert_eq!(lib.nvmlGpmSampleGet(other, request.samples[1]), 0);
        assert_eq!(
            call((&raw mut request).cast()),
            INVALID_ARGUMENT,
            "samples of two GPUs"
        );
        request.count = 100_000;
        assert_eq!(call((&raw mut request).cast()), INVALID_ARGUMENT);
        for sample in request.samples {
            assert_eq!(lib.nvmlGpmSampleFree(sample), 0);
        }
    }
}

#[test]
fn nvlink_fields_know_their_scopes() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(1_000);
        control.gpu(0).nvlink_rx_bytes_per_second = Some(18.0 * 1024.0 * 100.0);
    });
    let nvml = fake.nvml();
    let (lib, gpu) = (nvml.lib(), device(&nvml, 0));
    fake.set(|control| control.now_ms = Some(2_000));
    let mut values: [nvmlFieldValue_t; 4] = [zeroed(); 4];
    for (value, scope) in values.iter_mut().zip([0, 17, u32::MAX, 18]) {
        value.fieldId = 139;
        value.scopeId = scope;
    }
    // SAFETY: four entries.
    assert_eq!(
        unsafe { lib.nvmlDeviceGetFieldValues(gpu, 4, values.as_mut_ptr()) },
        0
    );
    // SAFETY: the type says which member of the union is set.
    let kib = values.map(|value| (value.nvmlReturn, unsafe { value.value.ullVal }));
    assert_eq!(kib, [(0, 100), (0, 100), (0, 1800), (INVALID_ARGUMENT, 0)]);
    assert!(values[..3].iter().all(|value| value.valueType == 3));
}

#[test]
fn many_threads_share_one_library() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        for index in 0..8 {
            control.gpu(index).busy = Some(f64::from(index) / 10.0);
        }
    });
    let nvml = fake.nvml();
    std::thread::scope(|scope| {
        for index in 0..8 {
            let nvml = &nvml;
            scope.spawn(move || {
                let device = nvml.device_by_index(index).unwrap();
                for _ in 0..500 {
                    assert_eq!(device.utilization_rates().unwrap().gpu, index * 10);
                    let sample = device.gpm_sample().unwrap();
                    sample.free().unwrap();
                }
            });
        }
    });
}

#[test]
fn several_fakes_live_in_one_process() {
    let (h100, t4) = (Fake::h100(), Fake::t4());
    let (first, second) = (h100.nvml(), t4.nvml());
    assert_eq!(
        first.device_by_index(0).unwrap().name().unwrap(),
        "NVIDIA H100 80GB HBM3"
    );
    assert_eq!(second.device_by_index(0).unwrap().name().unwrap(), "Tesla T4");
    assert_eq!(
        (first.device_count().unwrap(), second.device_count().unwrap()),
        (8, 4)
    );
}
