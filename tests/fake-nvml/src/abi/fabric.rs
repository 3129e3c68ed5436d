//! Fabric registration and topology between the GPUs of the node.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlC2cModeInfo_v1_t, nvmlDevice_t, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
    nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t, nvmlGpuTopologyLevel_t, nvmlPlatformInfo_v1_t,
    nvmlPlatformInfo_v2_t,
};

use super::identity::numa_node;
use super::{View, device_call, expect_version, put, version_of, version_word};
use crate::code::Code;
use crate::handle::Handle;

/// Every aspect of the mask says "false", that is: not degraded.
const HEALTHY_MASK: u32 = 0b01_10_10_10_10;
const HEALTHY: u8 = 1;

const TOPOLOGY_INTERNAL: u32 = 0;
const TOPOLOGY_NODE: u32 = 40;
const TOPOLOGY_SYSTEM: u32 = 50;

const P2P_OK: u32 = 0;
const P2P_CHIPSET_NOT_SUPPORTED: u32 = 1;
const P2P_NOT_SUPPORTED: u32 = 5;
/// Index of the NVLink capability.
const P2P_NVLINK: u32 = 2;

/// Parses `8-4-4-4-12` hex into bytes; anything else is the all-zero UUID, "no domain".
fn uuid_bytes(text: &str) -> [u8; 16] {
    let digits: Vec<u32> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
    let mut bytes = [0; 16];
    if digits.len() == 32 {
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (pair[0] << 4 | pair[1]) as u8;
        }
    }
    bytes
}

fn fabric(view: &View<'_>) -> nvmlGpuFabricInfo_v3_t {
    let control = &view.gpu().fabric;
    let profile = view.profile().fabric.as_ref();
    let state = control.state.or(profile.map(|fabric| fabric.state)).unwrap_or(0);
    let uuid = control
        .cluster_uuid
        .as_deref()
        .or(profile.map(|fabric| fabric.cluster_uuid.as_str()));
    let registered = state == 3;
    nvmlGpuFabricInfo_v3_t {
        version: version_word::<nvmlGpuFabricInfo_v3_t>(3),
        clusterUuid: if registered {
            uuid_bytes(uuid.unwrap_or_default())
        } else {
            [0; 16]
        },
        // Has a meaning in state 3 only.
        status: 0,
        cliqueId: control
            .clique
            .or(profile.map(|fabric| fabric.clique))
            .unwrap_or(0),
        state,
        healthMask: control
            .health_mask
            .unwrap_or(if registered { HEALTHY_MASK } else { 0 }),
        healthSummary: control
            .health_summary
            .unwrap_or(if registered { HEALTHY } else { 0 }),
    }
}

fn ancestor(view: &View<'_>, other: usize) -> u32 {
    if view.at == other {
        TOPOLOGY_INTERNAL
    } else if numa_node(view, view.at) == numa_node(view, other) {
        TOPOLOGY_NODE
    } else {
        TOPOLOGY_SYSTEM
    }
}

/// Where the GPU is in its rack.
fn platform(view: &View<'_>) -> Result<nvmlPlatformInfo_v2_t, Code> {
    let platform = view.profile().platform.as_ref().ok_or(Code::NOT_SUPPORTED)?;
    let mut chassis = [0; 16];
    // The last byte stays the NUL.
    for (to, from) in chassis.iter_mut().take(15).zip(platform.chassis_serial.bytes()) {
        *to = from;
    }
    let mut guid = [0; 16];
    guid[8..].copy_from_slice(&crate::identity::splitmix64(u64::from(view.gpu().index)).to_be_bytes());
    Ok(nvmlPlatformInfo_v2_t {
        version: version_word::<nvmlPlatformInfo_v2_t>(2),
        ibGuid: guid,
        chassisSerialNumber: chassis,
        slotNumber: platform.slot,
        trayIndex: platform.tray,
        hostId: platform.host,
        peerType: platform.peer_type,
        moduleId: view.gpu().index as u8 + 1,
    })
}

device_call! {
    nvmlDeviceGetGpuFabricInfoV(info: *mut nvmlGpuFabricInfo_v3_t) |view| {
        let answer = fabric(view);
        let newest = view.state.settings.driver.newest_fabric_info();
        // Two layouts share the entry: the caller's word says which one it has room for.
        match version_of(info)? {
            word if word == version_word::<nvmlGpuFabricInfo_v3_t>(3) && newest >= 3 => put(info, answer),
            word if word == version_word::<nvmlGpuFabricInfo_v2_t>(2) => put(info.cast(), nvmlGpuFabricInfo_v2_t {
                version: word,
                clusterUuid: answer.clusterUuid,
                status: answer.status,
                cliqueId: answer.cliqueId,
                state: answer.state,
                healthMask: answer.healthMask,
            }),
            _ => Err(Code::VERSION_MISMATCH),
        }
    };
    nvmlDeviceGetGpuFabricInfo(info: *mut nvmlGpuFabricInfo_t) |view| {
        let answer = fabric(view);
        put(info, nvmlGpuFabricInfo_t {
            clusterUuid: answer.clusterUuid,
            status: answer.status,
            cliqueId: answer.cliqueId,
            state: answer.state,
        })
    };
    nvmlDeviceGetTopologyCommonAncestor(other: nvmlDevice_t, level: *mut nvmlGpuTopologyLevel_t) |view| {
        let other = view.state.gpu_at(other)?;
        put(level, ancestor(view, other))
    };
    nvmlDeviceGetTopologyNearestGpus(
        level: nvmlGpuTopologyLevel_t, count: *mut c_uint, devices: *mut nvmlDevice_t,
    ) |view| {
        let near: Vec<nvmlDevice_t> = view
            .state
            .order
            .iter()
            .filter(|other| **other != view.at && ancestor(view, **other) <= level)
            .map(|other| Handle::Gpu(*other).pointer())
            .collect();
        // Unlike other lists: asked with a count of zero, it says the count and succeeds.
        if !count.is_null() && count.read() == 0 {
            return put(count, near.len() as c_uint);
        }
        view.put_list(devices, count, &near)
    };
    nvmlDeviceGetP2PStatus(other: nvmlDevice_t, index: nvmlGpuP2PCapsIndex_t, status: *mut nvmlGpuP2PStatus_t)
        |view| {
        view.state.gpu_at(other)?;
        if index > 4 {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(status, match (view.profile().nvlink.is_some(), index) {
            (true, _) => P2P_OK,
            (false, P2P_NVLINK) => P2P_NOT_SUPPORTED,
            (false, _) => P2P_CHIPSET_NOT_SUPPORTED,
        })
    };
    nvmlDeviceGetPlatformInfo(info: *mut nvmlPlatformInfo_v2_t) |view| {
        let first = expect_version(info.cast::<nvmlPlatformInfo_v1_t>(), 1);
        if view.state.settings.driver.newest_platform_info() >= 2 {
            first.or_else(|_| expect_version(info, 2))?;
        } else {
            first?;
        }
        let answer = platform(view)?;
        if (*info).version == answer.version {
            return put(info, answer);
        }
        put(info.cast(), nvmlPlatformInfo_v1_t {
            version: version_word::<nvmlPlatformInfo_v1_t>(1),
            ibGuid: answer.ibGuid,
            rackGuid: answer.chassisSerialNumber,
            chassisPhysicalSlotNumber: answer.slotNumber,
            computeSlotIndex: answer.trayIndex,
            nodeIndex: answer.hostId,
            peerType: answer.peerType,
            moduleId: answer.moduleId,
        })
    };
    nvmlDeviceGetC2cModeInfoV(info: *mut nvmlC2cModeInfo_v1_t) |view| {
        super::supported(view.profile().c2c.is_some())?;
        put(info, nvmlC2cModeInfo_v1_t { isC2cEnabled: 1 })
    };
    nvmlDeviceOnSameBoard(other: nvmlDevice_t, same: *mut std::ffi::c_int) |view| {
        let other = view.state.gpu_at(other)?;
        put(same, i32::from(other == view.at))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_uuids_are_read_as_bytes() {
        let bytes = uuid_bytes("00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(bytes[0..3], [0x00, 0x11, 0x22]);
        assert_eq!(bytes[15], 0xff);
        assert_eq!(uuid_bytes("short"), [0; 16]);
    }
}
