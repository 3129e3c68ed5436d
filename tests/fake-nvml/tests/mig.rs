//! MIG: layouts, holes, what each handle answers, a layout that changes under the client.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "instances are reached with raw calls only; pointers are to locals of the right type"
)]

mod support;

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use forewarm_fake_nvml::control::{Effect, Fault, MigControl, MigDeviceControl, Process};
use forewarm_fake_nvml::settings::Settings;
use forewarm_fake_nvml::{gpu_uuid, mig_uuid};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::*;
use support::{Fake, wait_until};

const INVALID_ARGUMENT: u32 = 2;
const NO_PERMISSION: u32 = 4;

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

/// An A100 with a 3g at gi 2 and two 1g with a hole between them.
fn a100() -> Fake {
    let mut fake = Fake::profile("a100-sxm4-40gb");
    fake.set(|control| {
        control.gpu(0).mig = layout(vec![
            MigDeviceControl {
                memory_used_bytes: Some(5 << 30),
                processes: vec![Process {
                    pid: 31,
                    sm: 0.5,
                    memory_bytes: 1 << 30,
                    ..Process::default()
                }],
                ..device(2, "3g.20gb")
            },
            device(9, "1g.5gb"),
            MigDeviceControl {
                index: Some(4),
                ..device(10, "1g.5gb")
            },
        ]);
    });
    fake
}

fn found<'nvml>(gpu: &Device<'nvml>) -> Vec<(u32, Device<'nvml>)> {
    (0..gpu.mig_device_count().unwrap())
        .filter_map(|index| match gpu.mig_device_by_index(index) {
            Ok(device) => Some((index, device)),
            Err(NvmlError::NotFound) => None,
            Err(other) => panic!("{other}"),
        })
        .collect()
}

#[test]
fn devices_are_enumerated_over_holes_and_named_by_their_profile() {
    let fake = a100();
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let mode = gpu.mig_mode().unwrap();
    assert_eq!((mode.current, mode.pending), (1, 1));
    assert!(!gpu.mig_is_mig_device_handle().unwrap());
    let devices = found(&gpu);
    assert_eq!(
        devices.iter().map(|(index, _)| *index).collect::<Vec<_>>(),
        [0, 1, 4]
    );
    let (_, first) = &devices[0];
    assert!(first.mig_is_mig_device_handle().unwrap());
    assert_eq!(first.name().unwrap(), "NVIDIA A100-SXM4-40GB MIG 3g.20gb");
    let parent = gpu_uuid("forewarm", 0);
    assert_eq!(first.uuid().unwrap(), mig_uuid(&parent, 2, 0));
    assert_eq!(devices[2].1.index().unwrap(), 4);
    assert_eq!(first.mig_parent_device().unwrap().uuid().unwrap(), parent);
    let attributes = first.attributes().unwrap();
    assert_eq!(attributes.multiprocessor_count, 42);
    assert_eq!(attributes.memory_size_mb, 19_968);
    let memory = first.memory_info().unwrap();
    assert_eq!((memory.total, memory.used), (19_968 << 20, 5 << 30));
    assert_eq!(gpu.memory_info().unwrap().used, 5 << 30, "the GPU's is their sum");
    let by_uuid = nvml.device_by_uuid(mig_uuid(&parent, 2, 0)).unwrap();
    assert_eq!(by_uuid.name().unwrap(), first.name().unwrap());

    let other = nvml.device_by_index(1).unwrap();
    assert_eq!(
        (
            other.mig_mode().unwrap().current,
            other.mig_device_count().unwrap()
        ),
        (0, 0)
    );
    assert!(matches!(other.mig_device_by_index(0), Err(NvmlError::NotFound)));
}

#[test]
fn utilisation_ends_where_mig_begins() {
    let fake = a100();
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let mig = gpu.mig_device_by_index(0).unwrap();
    for device in [&gpu, &mig] {
        assert!(matches!(device.utilization_rates(), Err(NvmlError::NotSupported)));
        assert!(matches!(
            device.process_utilization_stats(0),
            Err(NvmlError::NotSupported)
        ));
    }
    assert!(
        gpu.power_usage().is_ok(),
        "the board's readings stay with the GPU"
    );
    assert!(matches!(mig.power_usage(), Err(NvmlError::NotSupported)));
    assert!(matches!(mig.gpm_sample(), Err(NvmlError::NotSupported)), "Ampere");
    assert!(nvml.device_by_index(1).unwrap().utilization_rates().is_ok());
}

#[test]
fn processes_are_listed_on_each_device_and_on_the_gpu_for_administrators() {
    let mut fake = a100();
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let mig = |index| gpu.mig_device_by_index(index).unwrap();
    let on_device = mig(0).running_compute_processes().unwrap();
    assert_eq!(on_device[0].pid, 31);
    assert_eq!(
        (on_device[0].gpu_instance_id, on_device[0].compute_instance_id),
        (Some(2), Some(0))
    );
    assert!(mig(1).running_compute_processes().unwrap().is_empty());
    assert!(matches!(
        gpu.running_compute_processes(),
        Err(NvmlError::NoPermission)
    ));
    fake.set(|control| control.privileged = true);
    wait_until("an administrator sees all", || {
        gpu.running_compute_processes().is_ok_and(|list| list.len() == 1)
    });
}

/// GPU instance `gi` as `nvmlGpuInstanceGetInfo` tells it.
fn instance(nvml: &Nvml, gi: u32) -> Result<(u32, u32, u32), u32> {
    // SAFETY: the out pointers are to locals of the right type.
    unsafe {
        let gpu = nvml.device_by_index(0).unwrap().handle();
        let mut handle = null_mut();
        match nvml.lib().nvmlDeviceGetGpuInstanceById(gpu, gi, &raw mut handle) {
            0 => {}
            code => return Err(code),
        }
        let mut info: nvmlGpuInstanceInfo_t = std::mem::zeroed();
        match nvml.lib().nvmlGpuInstanceGetInfo(handle, &raw mut info) {
            0 => Ok((info.profileId, info.placement.start, info.placement.size)),
            code => Err(code),
        }
    }
}

#[test]
fn placements_are_told_to_administrators() {
    let mut fake = a100();
    let nvml = fake.nvml();
    assert_eq!(instance(&nvml, 2), Err(NO_PERMISSION));
    fake.set(|control| control.privileged = true);
    wait_until("administrator", || instance(&nvml, 2) == Ok((9, 0, 4)));
    assert_eq!(instance(&nvml, 9), Ok((19, 4, 1)));
    assert_eq!(instance(&nvml, 3), Err(6));
    let gpu = nvml.device_by_index(0).unwrap();
    // SAFETY: out pointers are to locals of the right type.
    unsafe {
        let mut info: nvmlGpuInstanceProfileInfo_t = std::mem::zeroed();
        let ask = |profile, info: &mut _| {
            nvml.lib()
                .nvmlDeviceGetGpuInstanceProfileInfo(gpu.handle(), profile, info)
        };
        assert_eq!(ask(0, &mut info), 0);
        assert_eq!(
            (info.id, info.multiprocessorCount, info.memorySizeMB),
            (19, 14, 4_864)
        );
        assert_eq!(ask(4, &mut info), 0);
        assert_eq!((info.multiprocessorCount, info.sliceCount), (98, 7));
        assert_eq!(ask(5, &mut info), 3, "no such profile on this model");
        assert_eq!(ask(17, &mut info), INVALID_ARGUMENT);
        let mut count = 0;
        let call = |at, count: &mut _| {
            nvml.lib()
                .nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu.handle(), 9, at, count)
        };
        assert_eq!((call(null_mut(), &mut count), count), (0, 2));
        let mut places: [nvmlGpuInstancePlacement_t; 2] = std::mem::zeroed();
        assert_eq!(call(places.as_mut_ptr(), &mut count), 0);
        assert_eq!(places.map(|place| (place.start, place.size)), [(0, 4), (4, 4)]);
    }
}

#[test]
fn a_handle_of_a_destroyed_device_is_invalid_until_its_index_is_asked_for_anew() {
    let mut fake = a100();
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let (first, second) = (
        gpu.mig_device_by_index(0).unwrap(),
        gpu.mig_device_by_index(1).unwrap(),
    );
    let before = first.uuid().unwrap();
    let set = nvml.create_event_set().unwrap();
    let kinds = nvml_wrapper::bitmasks::event::EventTypes::from_bits_retain(0x100);
    let set = gpu.register_events(kinds, set).unwrap();
    // Index 0 has another device now, index 1 none.
    fake.set(|control| control.gpu(0).mig = layout(vec![device(1, "3g.20gb")]));
    wait_until("the layout changes", || {
        matches!(first.uuid(), Err(NvmlError::InvalidArg))
    });
    assert!(set.wait(0).is_ok(), "an event tells of it");
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)), "once");
    assert!(matches!(second.memory_info(), Err(NvmlError::InvalidArg)));
    assert!(matches!(gpu.mig_device_by_index(1), Err(NvmlError::NotFound)));
    let renewed = gpu.mig_device_by_index(0).unwrap();
    assert_ne!(renewed.uuid().unwrap(), before);
    // Handles are reused: the old one now stands for the new device.
    assert_eq!(first.uuid().unwrap(), renewed.uuid().unwrap());

    fake.set(|control| control.gpu(0).mig = None);
    wait_until("MIG is off", || gpu.mig_mode().unwrap().current == 0);
    assert!(matches!(renewed.uuid(), Err(NvmlError::InvalidArg)));
    assert!(gpu.utilization_rates().is_ok());
}

#[test]
fn a_change_of_load_is_no_change_of_layout() {
    let mut fake = a100();
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let mig = gpu.mig_device_by_index(0).unwrap();
    fake.set(|control| {
        control.gpu(0).mig.as_mut().unwrap().devices[0].memory_used_bytes = Some(6 << 30);
    });
    wait_until("the load changes", || {
        mig.memory_info().is_ok_and(|memory| memory.used == 6 << 30)
    });
}

#[test]
fn a_mode_can_be_pending() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        control.gpu(0).mig = Some(MigControl {
            enabled: Some(false),
            pending: Some(true),
            ..MigControl::default()
        });
    });
    let nvml = fake.nvml();
    let mode = nvml.device_by_index(0).unwrap().mig_mode().unwrap();
    assert_eq!((mode.current, mode.pending), (0, 1));
}

#[test]
fn uuids_had_another_form_before_r470() {
    let mut fake = Fake::new(Settings {
        profile: Some("a100-sxm4-40gb".into()),
        driver: Some("460.91.03".into()),
        ..Settings::default()
    });
    fake.set(|control| control.gpu(0).mig = layout(vec![device(7, "1g.5gb")]));
    let nvml = fake.nvml();
    let mig = nvml.device_by_index(0).unwrap().mig_device_by_index(0).unwrap();
    assert_eq!(
        mig.uuid().unwrap(),
        format!("MIG-{}/7/0", gpu_uuid("forewarm", 0))
    );
}

#[test]
fn a_fault_can_strike_one_mig_device() {
    let mut fake = a100();
    let nvml = fake.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let (first, second) = (
        gpu.mig_device_by_index(0).unwrap(),
        gpu.mig_device_by_index(1).unwrap(),
    );
    fake.set(|control| {
        control.faults = vec![Fault {
            mig: Some(0),
            ..Fault::on_gpu(0, Effect::Error(999))
        }];
    });
    wait_until("struck", || {
        matches!(first.memory_info(), Err(NvmlError::Unknown))
    });
    assert!(second.memory_info().is_ok() && gpu.memory_info().is_ok());
}

#[test]
fn many_readers_survive_layouts_that_change_under_them() {
    let mut fake = a100();
    let nvml = fake.nvml();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let gpu = nvml.device_by_index(0).unwrap();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    for index in 0..gpu.mig_device_count().unwrap() {
                        let Ok(mig) = gpu.mig_device_by_index(index) else {
                            continue;
                        };
                        match mig.uuid() {
                            Ok(_) | Err(NvmlError::InvalidArg) => {}
                            Err(other) => panic!("{other}"),
                        }
                    }
                }
            });
        }
        let until = Instant::now() + Duration::from_millis(300);
        let mut turn = 0_u32;
        while Instant::now() < until {
            turn += 1;
            let profile = if turn.is_multiple_of(2) {
                "3g.20gb"
            } else {
                "2g.10gb"
            };
            let mig = if turn.is_multiple_of(5) {
                None
            } else {
                layout(vec![device(1 + turn % 3, profile)])
            };
            fake.set(|control| control.gpu(0).mig = mig);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
