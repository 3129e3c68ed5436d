//! What a GPU is: names, numbers, PCI place, MIG mode.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlBAR1Memory_t, nvmlBrandType_t, nvmlComputeMode_t, nvmlDevice_t, nvmlDeviceArchitecture_t,
    nvmlDeviceAttributes_t, nvmlEnableState_t, nvmlGpuVirtualizationMode_t, nvmlPciInfo_t,
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
    nvmlDeviceGetName(name: *mut c_char, length: c_uint) |view| put_text(name, length, &view.profile().name);
    nvmlDeviceGetUUID(uuid: *mut c_char, length: c_uint) |view| put_text(uuid, length, &view.gpu().uuid);
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
    nvmlDeviceGetIndex(index: *mut c_uint) |view| put(index, view.gpu().index);
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
    nvmlDeviceGetVirtualizationMode(mode: *mut nvmlGpuVirtualizationMode_t) |view| put(mode, 0);
    nvmlDeviceGetGspFirmwareMode(enabled: *mut c_uint, default: *mut c_uint) |view| {
        let on = u32::from(view.profile().architecture.code() >= 6);
        put(enabled, on)?;
        put(default, on)
    };
    nvmlDeviceGetGspFirmwareVersion(version: *mut c_char) |view|
        // The header asks for a buffer of NVML_GSP_FIRMWARE_VERSION_BUF_SIZE (64) bytes.
        put_text(version, 64, &view.state.settings.driver.to_string());
    nvmlDeviceGetBAR1MemoryInfo(memory: *mut nvmlBAR1Memory_t) |view| {
        let total = view.profile().bar1_total_mib << 20;
        let used = 1 << 20;
        put(memory, nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    };
    nvmlDeviceGetMigMode(current: *mut c_uint, pending: *mut c_uint) |view| {
        supported(view.profile().mig)?;
        put(current, 0)?;
        put(pending, 0)
    };
    nvmlDeviceGetMaxMigDeviceCount(count: *mut c_uint) |view| put(count, 0);
    nvmlDeviceGetMigDeviceHandleByIndex(index: c_uint, mig: *mut nvmlDevice_t) |view| {
        supported(view.profile().mig)?;
        _ = (index, mig);
        Err(Code::NOT_FOUND)
    };
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(parent: *mut nvmlDevice_t) |view| {
        _ = parent;
        Err(Code::INVALID_ARGUMENT)
    };
    nvmlDeviceIsMigDeviceHandle(is_mig: *mut c_uint) |view| put(is_mig, 0);
    nvmlDeviceGetGpuInstanceId(id: *mut c_uint) |view| { _ = id; Err(Code::NOT_SUPPORTED) };
    nvmlDeviceGetComputeInstanceId(id: *mut c_uint) |view| { _ = id; Err(Code::NOT_SUPPORTED) };
    nvmlDeviceGetAttributes_v2(attributes: *mut nvmlDeviceAttributes_t) |view| {
        _ = attributes;
        Err(Code::NOT_SUPPORTED)
    };
    nvmlDeviceGetLastBBXFlushTime(time: *mut c_ulonglong, duration: *mut std::ffi::c_ulong) |view| {
        _ = (time, duration);
        Err(Code::NOT_SUPPORTED)
    };
}
