//! GPUs that come and go, and what event sets and system event sets are told.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "event bits and system events are reached with raw calls; pointers are to locals of the right type"
)]

mod support;

use std::ptr::null_mut;

use forewarm_fake_nvml::control::{EventEntry, EventKind};
use forewarm_fake_nvml::{gpu_uuid, pci_bus_id};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::*;
use support::{Fake, wait_until};

fn word<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap() | (version << 24)
}

fn uuids(nvml: &Nvml) -> Vec<String> {
    (0..nvml.device_count().unwrap())
        .map(|index| nvml.device_by_index(index).unwrap().uuid().unwrap())
        .collect()
}

#[test]
fn indices_close_up_after_an_unbind_for_those_who_come_later() {
    let mut fake = Fake::t4();
    let nvml = fake.nvml();
    let (second, third) = (nvml.device_by_index(1).unwrap(), nvml.device_by_index(2).unwrap());
    fake.set(|control| control.gpu(1).bound = Some(false));
    wait_until("unbound", || matches!(second.uuid(), Err(NvmlError::GpuLost)));
    assert_eq!(
        nvml.device_count().unwrap(),
        4,
        "who holds the library sees the old node"
    );
    assert_eq!(third.index().unwrap(), 2);
    // Bound again, the old client still cannot use it.
    fake.set(|control| control.gpu(1).bound = Some(true));
    fake.set(|control| control.gpu(1).bound = Some(false));
    assert!(matches!(second.uuid(), Err(NvmlError::GpuLost)));
    drop(nvml);

    let nvml = fake.nvml();
    let left: Vec<String> = [0, 2, 3].map(|index| gpu_uuid("forewarm", index)).into();
    assert_eq!(uuids(&nvml), left);
    let moved = nvml.device_by_index(1).unwrap();
    assert_eq!((moved.index().unwrap(), moved.minor_number().unwrap()), (1, 2));
    assert_eq!(moved.pci_info().unwrap().bus_id, pci_bus_id(2));
    let gone = nvml.device_by_uuid(gpu_uuid("forewarm", 1));
    assert!(matches!(gone, Err(NvmlError::NotFound)));
}

#[test]
fn system_events_tell_of_unbinding_and_binding() {
    let mut fake = Fake::h100();
    let nvml = fake.nvml();
    let lib = nvml.lib();
    // SAFETY: requests are locals of the right type; the set is checked by the library.
    unsafe {
        let mut create: nvmlSystemEventSetCreateRequest_t = std::mem::zeroed();
        assert_eq!(
            lib.nvmlSystemEventSetCreate(&raw mut create),
            25,
            "no version word"
        );
        create.version = word::<nvmlSystemEventSetCreateRequest_t>(1);
        assert_eq!(lib.nvmlSystemEventSetCreate(&raw mut create), 0);
        let mut register: nvmlSystemRegisterEventRequest_t = std::mem::zeroed();
        register.version = word::<nvmlSystemRegisterEventRequest_t>(1);
        (register.eventTypes, register.set) = (3, create.set);
        assert_eq!(lib.nvmlSystemRegisterEvents(&raw mut register), 0);
        let mut data: [nvmlSystemEventData_v1_t; 4] = std::mem::zeroed();
        let mut wait: nvmlSystemEventSetWaitRequest_t = std::mem::zeroed();
        wait.version = word::<nvmlSystemEventSetWaitRequest_t>(1);
        (wait.set, wait.data, wait.dataSize) = (create.set, data.as_mut_ptr(), 4);
        assert_eq!(lib.nvmlSystemEventSetWait(&raw mut wait), 10, "nothing yet");
        fake.set(|control| control.gpu(3).bound = Some(false));
        wait.timeoutms = 20_000;
        assert_eq!((lib.nvmlSystemEventSetWait(&raw mut wait), wait.numEvent), (0, 1));
        fake.set(|control| control.gpu(3).bound = None);
        let unbound = data[0];
        assert_eq!((lib.nvmlSystemEventSetWait(&raw mut wait), wait.numEvent), (0, 1));
        assert_eq!((unbound.eventType, data[0].eventType), (1, 2));
        assert_eq!(unbound.gpuId, data[0].gpuId);
        let mut free: nvmlSystemEventSetFreeRequest_t = std::mem::zeroed();
        (free.version, free.set) = (word::<nvmlSystemEventSetFreeRequest_t>(1), create.set);
        assert_eq!(lib.nvmlSystemEventSetFree(&raw mut free), 0);
        assert_eq!(lib.nvmlSystemEventSetFree(&raw mut free), 2);
    }
}

#[test]
fn every_event_reaches_its_set_with_the_instance_for_administrators_only() {
    let mut fake = Fake::h100();
    let nvml = fake.nvml();
    let lib = nvml.lib();
    let gpu = nvml.device_by_index(0).unwrap();
    let mut kinds = 0;
    // SAFETY: an out pointer to a local; the wrapper would drop the bits that it does not know.
    let code = unsafe { lib.nvmlDeviceGetSupportedEventTypes(gpu.handle(), &raw mut kinds) };
    assert_eq!(code, 0);
    assert_eq!(
        kinds & EventKind::RecoveryAction.bit(),
        EventKind::RecoveryAction.bit()
    );
    // SAFETY: out pointers are to locals; the set is checked by the library.
    unsafe {
        let mut set = null_mut();
        assert_eq!(lib.nvmlEventSetCreate(&raw mut set), 0);
        assert_eq!(lib.nvmlDeviceRegisterEvents(gpu.handle(), kinds, set), 0);
        let entry = |kind, data| EventEntry {
            kind,
            data,
            gi: Some(3),
            ci: Some(0),
        };
        fake.set(|control| {
            control.gpu(0).events = vec![entry(EventKind::SingleBitEccStorm, 0), entry(EventKind::Xid, 94)];
        });
        let mut data: nvmlEventData_t = std::mem::zeroed();
        let mut wait = |expected: (u64, u64, u32)| {
            assert_eq!(lib.nvmlEventSetWait_v2(set, &raw mut data, 20_000), 0);
            assert_eq!((data.eventType, data.eventData, data.gpuInstanceId), expected);
        };
        wait((0x200, 0, u32::MAX));
        wait((0x8, 94, u32::MAX));
        fake.set(|control| {
            control.privileged = true;
            control.gpu(0).events.push(entry(EventKind::RecoveryAction, 1));
        });
        wait((0x8000, 1, 3));
        assert_eq!(lib.nvmlEventSetFree(set), 0);
    }
}
