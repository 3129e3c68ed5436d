//! What a GPU is: names, numbers, PCI place, MIG mode.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlBAR1Memory_t, nvmlBrandType_t, nvmlComputeMode_t, nvmlDeviceArchitecture_t, nvmlEnableState_t,
    nvmlGpuVirtualizationMode_t, nvmlPciInfo_t,
};

use super::{View, device_call, put, put_text, supported};
use crate::code::Code;
use crate::identity;

/// Copies ASCII into a NUL-padded array of a struct.
fn fill<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    array
}

fn pci_info(view: &View<'_>) -> nvmlPciInfo_t {
    let index = view.gpu().index;
    let bus_id = identity::pci_bus_id(index);
    nvmlPciInfo_t {
        busIdLegacy: fill(&bus_id[4..]),
        domain: 0,
        bus: identity::pci_bus(index),
        device: 0,
        pciDeviceId: view.profile().pci_device_id,
        pciSubSystemId: view.profile().pci_subsystem_id,
        busId: fill(&bus_id),
    }
}

/// NUMA node: the first half of the GPUs on node 0, the rest on node 1.
pub(crate) fn numa_node(view: &View<'_>, at: usize) -> u32 {
    u32::from(at >= view.state.gpus.len().div_ceil(2))
}

device_call! {
    nvmlDeviceGetName(name: *mut c_char, length: c_uint) |view| {
        let name_of = view.mig_device().map_or(&view.profile().name, |device| &device.name);
        put_text(name, length, name_of)
    };
    nvmlDeviceGetUUID(uuid: *mut c_char, length: c_uint) |view|
        put_text(uuid, length, view.mig_device().map_or(&view.gpu().uuid, |device| &device.uuid));
    nvmlDeviceGetSerial(serial: *mut c_char, length: c_uint) |view|
        put_text(serial, length, &identity::serial(&view.state.settings.uuid_seed, view.gpu().index));
    nvmlDeviceGetVbiosVersion(version: *mut c_char, length: c_uint) |view|
        put_text(version, length, &view.profile().vbios);
    nvmlDeviceGetBoardPartNumber(number: *mut c_char, length: c_uint) |view|
        put_text(number, length, "900-FAKE0-0000-000");
    nvmlDeviceGetInforomImageVersion(version: *mut c_char, length: c_uint) |view| {
        supported(view.profile().ecc.supported)?;
        put_text(version, length, "G520.0200.00.05")
    };
    // A MIG device's index is the one among those of its GPU.
    nvmlDeviceGetIndex(index: *mut c_uint) |view| {
        let among_gpus = view.state.order.iter().position(|at| *at == view.at).map(|at| at as c_uint);
        put(index, view.mig.or(among_gpus).ok_or(Code::INVALID_ARGUMENT)?)
    };
    nvmlDeviceGetMinorNumber(minor: *mut c_uint) |view| put(minor, view.gpu().index);
    nvmlDeviceGetModuleId(module: *mut c_uint) |view| {
        supported(view.profile().fabric.is_some())?;
        put(module, view.gpu().index + 1)
    };
    nvmlDeviceGetBoardId(board: *mut c_uint) |view| put(board, identity::pci_bus(view.gpu().index) << 8);
    nvmlDeviceGetMultiGpuBoard(multi: *mut c_uint) |view| put(multi, 0);
    nvmlDeviceGetBrand(brand: *mut nvmlBrandType_t) |view| put(brand, view.profile().brand.code());
    nvmlDeviceGetArchitecture(architecture: *mut nvmlDeviceArchitecture_t) |view|
        put(architecture, view.profile().architecture.code());
    nvmlDeviceGetCudaComputeCapability(major: *mut c_int, minor: *mut c_int) |view| {
        let [high, low] = view.profile().compute_capability;
        put(major, high)?;
        put(minor, low)
    };
    nvmlDeviceGetNumGpuCores(cores: *mut c_uint) |view| put(cores, view.profile().cores);
    nvmlDeviceGetMemoryBusWidth(width: *mut c_uint) |view| put(width, view.profile().memory_bus_width_bits);
    nvmlDeviceGetNumaNodeId(node: *mut c_uint) |view| put(node, numa_node(view, view.at));
    nvmlDeviceGetPciInfo_v3(pci: *mut nvmlPciInfo_t) |view| put(pci, pci_info(view));
    nvmlDeviceGetPciInfo_v2(pci: *mut nvmlPciInfo_t) |view| put(pci, pci_info(view));
    nvmlDeviceGetPersistenceMode(mode: *mut nvmlEnableState_t) |view| put(mode, 1);
    nvmlDeviceGetDisplayMode(mode: *mut nvmlEnableState_t) |view| put(mode, 0);
    nvmlDeviceGetDisplayActive(active: *mut nvmlEnableState_t) |view| put(active, 0);
    nvmlDeviceGetComputeMode(mode: *mut nvmlComputeMode_t) |view| put(mode, 0);
    nvmlDeviceGetVirtualizationMode(mode: *mut nvmlGpuVirtualizationMode_t) |view|
        put(mode, view.profile().virtualization as u32);
    nvmlDeviceGetGspFirmwareMode(enabled: *mut c_uint, default: *mut c_uint) |view| {
        let on = u32::from(view.profile().architecture.code() >= 6);
        put(enabled, on)?;
        put(default, on)
    };
    nvmlDeviceGetGspFirmwareVersion(version: *mut c_char) |view|
        // The header asks for a buffer of NVML_GSP_FIRMWARE_VERSION_BUF_SIZE (64) bytes.
        put_text(version, 64, &view.state.settings.driver.to_string());
    nvmlDeviceGetBAR1MemoryInfo(memory: *mut nvmlBAR1Memory_t) |view| {
        // A MIG device has its part of the aperture.
        let slices = view.mig_device().map_or(8, |device| u64::from(device.profile.size));
        let total = (view.profile().bar1_total_mib << 20) / 8 * slices;
        let used = 1 << 20;
        put(memory, nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    };
    nvmlDeviceGetLastBBXFlushTime(time: *mut c_ulonglong, duration: *mut std::ffi::c_ulong) |view| {
        _ = (time, duration);
        Err(Code::NOT_SUPPORTED)
    };
}
