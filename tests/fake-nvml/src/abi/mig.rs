//! MIG: mode, devices, GPU instances and their profiles.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAttributes_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlGpuInstanceProfileInfo_v3_t, nvmlReturn_t,
};

use super::{View, call_about, device_call, put, supported, version_of, version_word};
use crate::code::Code;
use crate::handle::{Handle, MIG_DEVICES};
use crate::mig::{Device, Instance, MigProfile};
use crate::state::Target;

/// Profile numbers end here (`NVML_GPU_INSTANCE_PROFILE_COUNT`).
const PROFILE_END: u32 = 17;
/// First branch that tells profiles while MIG is off. Not documented; taken from the field that announces it.
const TELLS_PROFILES_WITHOUT_MIG: u32 = 535;

/// The MIG device that was asked; calls for MIG devices are invalid on a GPU.
fn device<'a>(view: &'a View<'_>) -> Result<&'a Device, Code> {
    view.mig_device().ok_or(Code::INVALID_ARGUMENT)
}

/// Instances and their profiles are there with MIG on.
fn enabled(view: &View<'_>) -> Result<(), Code> {
    supported(view.gpu().layout.enabled)
}

/// Instances are for administrators.
fn administered(view: &View<'_>) -> Result<(), Code> {
    enabled(view)?;
    if view.state.control.privileged {
        Ok(())
    } else {
        Err(Code::NO_PERMISSION)
    }
}

/// Row of the model's table with profile number `profile`.
fn profile_numbered<'a>(view: &'a View<'_>, profile: u32) -> Result<&'a MigProfile, Code> {
    if profile >= PROFILE_END {
        return Err(Code::INVALID_ARGUMENT);
    }
    supported(view.gpu().layout.enabled || view.state.settings.driver.major() >= TELLS_PROFILES_WITHOUT_MIG)?;
    let mut rows = view.profile().mig_profiles.iter();
    rows.find(|row| row.profile == profile).ok_or(Code::NOT_SUPPORTED)
}

/// Row with the model's own id `id`.
fn profile_with_id<'a>(view: &'a View<'_>, id: u32) -> Result<&'a MigProfile, Code> {
    enabled(view)?;
    let mut rows = view.profile().mig_profiles.iter();
    rows.find(|row| row.id == id).ok_or(Code::INVALID_ARGUMENT)
}

fn profile_info(row: &MigProfile) -> nvmlGpuInstanceProfileInfo_t {
    let [copy, decoders, encoders, jpegs, flows] = row.engines;
    nvmlGpuInstanceProfileInfo_t {
        id: row.id,
        isP2pSupported: 0,
        sliceCount: row.slices,
        instanceCount: row.instances,
        multiprocessorCount: row.sms,
        copyEngineCount: copy,
        decoderCount: decoders,
        encoderCount: encoders,
        jpegCount: jpegs,
        ofaCount: flows,
        memorySizeMB: row.memory_mib,
    }
}

/// `MIG 1g.10gb` in the array of a struct.
fn name_of(row: &MigProfile) -> [c_char; 96] {
    let mut name = [0; 96];
    let text = format!("MIG {}", row.name);
    for (to, from) in name.iter_mut().take(95).zip(text.bytes()) {
        *to = from as c_char;
    }
    name
}

fn attributes(device: &Device) -> nvmlDeviceAttributes_t {
    let [copy, decoders, encoders, jpegs, flows] = device.profile.engines;
    nvmlDeviceAttributes_t {
        multiprocessorCount: device.profile.sms_of(device.slices),
        sharedCopyEngineCount: copy,
        sharedDecoderCount: decoders,
        sharedEncoderCount: encoders,
        sharedJpegCount: jpegs,
        sharedOfaCount: flows,
        gpuInstanceSliceCount: device.profile.slices,
        computeInstanceSliceCount: device.slices,
        memorySizeMB: device.profile.memory_mib,
    }
}

/// Instances made by the profile with id `id`.
fn made_by<'a>(view: &'a View<'_>, id: u32) -> Vec<&'a Instance> {
    let instances = &view.gpu().layout.instances;
    instances
        .iter()
        .filter(|instance| instance.profile.id == id)
        .collect()
}

/// Whether `instance` covers one of the memory slices from `start` on.
fn overlaps(instance: &Instance, start: u32, size: u32) -> bool {
    start < instance.start + instance.profile.size && instance.start < start + size
}

/// Writes items to an array that the client made long enough, as it learnt by asking with none.
///
/// # Safety
/// A non-null `count` is valid for a write, a non-null `array` for writes of all items.
unsafe fn put_all<T: Copy>(array: *mut T, count: *mut c_uint, items: &[T]) -> Result<(), Code> {
    // SAFETY: the caller's promise.
    unsafe {
        put(count, items.len() as c_uint)?;
        if !array.is_null() {
            std::ptr::copy_nonoverlapping(items.as_ptr(), array, items.len());
        }
    }
    Ok(())
}

device_call! {
    nvmlDeviceGetMigMode(current: *mut c_uint, pending: *mut c_uint) |view| {
        supported(view.profile().mig)?;
        put(current, u32::from(view.gpu().layout.enabled))?;
        put(pending, u32::from(view.gpu().layout.pending))
    };
    nvmlDeviceGetMaxMigDeviceCount(count: *mut c_uint) |view|
        put(count, if view.gpu().layout.enabled { MIG_DEVICES } else { 0 });
    nvmlDeviceGetMigDeviceHandleByIndex(index: c_uint, mig: *mut nvmlDevice_t) |view| {
        supported(view.profile().mig)?;
        if !view.gpu().layout.enabled {
            return Err(Code::NOT_FOUND);
        }
        if index >= MIG_DEVICES {
            return Err(Code::INVALID_ARGUMENT);
        }
        let at = view.at;
        put(mig, view.state.give_mig(at, index)?.pointer())
    };
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(parent: *mut nvmlDevice_t) |view| {
        device(view)?;
        put(parent, Handle::Gpu(view.at).pointer())
    };
    nvmlDeviceIsMigDeviceHandle(is_mig: *mut c_uint) |view| put(is_mig, u32::from(view.mig.is_some()));
    nvmlDeviceGetGpuInstanceId(id: *mut c_uint) |view| put(id, device(view)?.gi);
    nvmlDeviceGetComputeInstanceId(id: *mut c_uint) |view| put(id, device(view)?.ci);
    nvmlDeviceGetAttributes_v2(to: *mut nvmlDeviceAttributes_t) |view| {
        supported(view.mig.is_some())?;
        put(to, attributes(device(view)?))
    };
    nvmlDeviceGetGpuInstanceProfileInfo(profile: c_uint, info: *mut nvmlGpuInstanceProfileInfo_t) |view|
        put(info, profile_info(profile_numbered(view, profile)?));
    nvmlDeviceGetGpuInstanceProfileInfoV(profile: c_uint, info: *mut nvmlGpuInstanceProfileInfo_v2_t) |view| {
        let word = version_of(info)?;
        let third = version_word::<nvmlGpuInstanceProfileInfo_v3_t>(3);
        if word != third && word != version_word::<nvmlGpuInstanceProfileInfo_v2_t>(2) {
            return Err(Code::VERSION_MISMATCH);
        }
        let row = profile_numbered(view, profile)?;
        let plain = profile_info(row);
        if word == third {
            return put(info.cast(), nvmlGpuInstanceProfileInfo_v3_t {
                version: word,
                id: plain.id,
                sliceCount: plain.sliceCount,
                instanceCount: plain.instanceCount,
                multiprocessorCount: plain.multiprocessorCount,
                copyEngineCount: plain.copyEngineCount,
                decoderCount: plain.decoderCount,
                encoderCount: plain.encoderCount,
                jpegCount: plain.jpegCount,
                ofaCount: plain.ofaCount,
                memorySizeMB: plain.memorySizeMB,
                name: name_of(row),
                capabilities: 0,
            });
        }
        put(info, nvmlGpuInstanceProfileInfo_v2_t {
            version: word,
            id: plain.id,
            isP2pSupported: plain.isP2pSupported,
            sliceCount: plain.sliceCount,
            instanceCount: plain.instanceCount,
            multiprocessorCount: plain.multiprocessorCount,
            copyEngineCount: plain.copyEngineCount,
            decoderCount: plain.decoderCount,
            encoderCount: plain.encoderCount,
            jpegCount: plain.jpegCount,
            ofaCount: plain.ofaCount,
            memorySizeMB: plain.memorySizeMB,
            name: name_of(row),
        })
    };
    nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        id: c_uint, placements: *mut nvmlGpuInstancePlacement_t, count: *mut c_uint,
    ) |view| {
        let row = profile_with_id(view, id)?;
        let all: Vec<nvmlGpuInstancePlacement_t> = row
            .starts
            .iter()
            .map(|start| nvmlGpuInstancePlacement_t { start: *start, size: row.size })
            .collect();
        put_all(placements, count, &all)
    };
    nvmlDeviceGetGpuInstanceRemainingCapacity(id: c_uint, count: *mut c_uint) |view| {
        let row = profile_with_id(view, id)?;
        let free = row.starts.iter().filter(|start| {
            !view.gpu().layout.instances.iter().any(|made| overlaps(made, **start, row.size))
        });
        let left = row.instances.saturating_sub(made_by(view, id).len() as u32);
        put(count, (free.count() as c_uint).min(left))
    };
    nvmlDeviceGetGpuInstances(id: c_uint, instances: *mut nvmlGpuInstance_t, count: *mut c_uint) |view| {
        administered(view)?;
        profile_with_id(view, id)?;
        let made: Vec<nvmlGpuInstance_t> = made_by(view, id)
            .iter()
            .map(|instance| Handle::Instance(view.at, instance.gi).pointer())
            .collect();
        put_all(instances, count, &made)
    };
    nvmlDeviceGetGpuInstanceById(id: c_uint, instance: *mut nvmlGpuInstance_t) |view| {
        administered(view)?;
        let gi = view.gpu().layout.instance(id).ok_or(Code::NOT_FOUND)?.gi;
        put(instance, Handle::Instance(view.at, gi).pointer())
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetInfo(
    instance: nvmlGpuInstance_t,
    info: *mut nvmlGpuInstanceInfo_t,
) -> nvmlReturn_t {
    let Some(Handle::Instance(gpu, gi)) = Handle::of(instance) else {
        return Code::INVALID_ARGUMENT.0;
    };
    call_about(
        "nvmlGpuInstanceGetInfo",
        |state| {
            let seen = state.order.contains(&gpu);
            seen.then_some(Target::gpu(gpu)).ok_or(Code::INVALID_ARGUMENT)
        },
        |view| {
            let made = view.gpu().layout.instance(gi).ok_or(Code::INVALID_ARGUMENT)?;
            let answer = nvmlGpuInstanceInfo_t {
                device: Handle::Gpu(gpu).pointer(),
                id: gi,
                profileId: made.profile.id,
                placement: nvmlGpuInstancePlacement_t {
                    start: made.start,
                    size: made.profile.size,
                },
            };
            // SAFETY: a non-null pointer is valid by NVML's contract.
            unsafe { put(info, answer) }
        },
    )
}
