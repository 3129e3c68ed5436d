//! NVLink: state, version, errors and peers of each link.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlEnableState_t, nvmlIntNvLinkDeviceType_t, nvmlNvLinkCapability_t, nvmlNvLinkErrorCounter_t,
    nvmlPciInfo_t,
};

use super::{View, device_call, put};
use crate::code::Code;
use crate::identity;
use crate::profile::Nvlink;

/// A link of the board, or what is wrong with the question.
pub(crate) fn link<'a>(view: &'a View<'_>, number: u32) -> Result<&'a Nvlink, Code> {
    let nvlink = view.profile().nvlink.as_ref().ok_or(Code::NOT_SUPPORTED)?;
    if number < nvlink.links {
        Ok(nvlink)
    } else {
        Err(Code::INVALID_ARGUMENT)
    }
}

/// Error total of a link: the control gives totals of all links, which are reported on link 0.
pub(crate) fn errors(view: &View<'_>, number: u32, counter: nvmlNvLinkErrorCounter_t) -> Result<u64, Code> {
    link(view, number)?;
    let totals = &view.gpu().totals.nvlink;
    let total = match counter {
        0 => totals.replay,
        1 => totals.recovery,
        2 => totals.crc_flit,
        3 => totals.crc_data,
        4 => totals.ecc_data,
        _ => return Err(Code::INVALID_ARGUMENT),
    };
    Ok(if number == 0 { total } else { 0 })
}

/// PCI place of what a link ends on: one of four switches behind a bridge, or another GPU of the node.
fn remote(view: &View<'_>, number: u32) -> Result<nvmlPciInfo_t, Code> {
    let (bus, device_id) = if link(view, number)?.switched {
        (0x05 + number % 4, 0x22A3_10DE)
    } else {
        (
            identity::pci_bus(peer(view, number)?),
            view.profile().pci_device_id,
        )
    };
    let text = format!("00000000:{bus:02X}:00.0");
    let mut info = nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus,
        device: 0,
        pciDeviceId: device_id,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    for (to, from) in info.busId.iter_mut().zip(text.bytes()) {
        *to = from as std::ffi::c_char;
    }
    for (to, from) in info.busIdLegacy.iter_mut().zip(text.bytes().skip(4)) {
        *to = from as std::ffi::c_char;
    }
    Ok(info)
}

/// The GPU at the other end of a link without switches: the others in turn.
fn peer(view: &View<'_>, number: u32) -> Result<u32, Code> {
    let others: Vec<u32> = view
        .state
        .gpus
        .iter()
        .map(|gpu| gpu.index)
        .filter(|index| *index != view.gpu().index)
        .collect();
    let nth = number as usize % others.len().max(1);
    others.get(nth).copied().ok_or(Code::NOT_SUPPORTED)
}

device_call! {
    nvmlDeviceGetNvLinkState(number: c_uint, active: *mut nvmlEnableState_t) |view| {
        link(view, number)?;
        put(active, u32::from(view.load().link_up(number)))
    };
    nvmlDeviceGetNvLinkVersion(number: c_uint, version: *mut c_uint) |view|
        put(version, link(view, number)?.version);
    nvmlDeviceGetNvLinkCapability(number: c_uint, capability: nvmlNvLinkCapability_t, result: *mut c_uint) |view| {
        link(view, number)?;
        match capability {
            // P2P, system memory access, P2P atomics, system memory atomics; no SLI bridge; the link is valid.
            0..=3 | 5 => put(result, 1),
            4 => put(result, 0),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    };
    nvmlDeviceGetNvLinkErrorCounter(number: c_uint, counter: nvmlNvLinkErrorCounter_t, count: *mut c_ulonglong)
        |view| put(count, view.long(errors(view, number, counter)?));
    nvmlDeviceGetNvLinkRemoteDeviceType(number: c_uint, kind: *mut nvmlIntNvLinkDeviceType_t) |view|
        put(kind, if link(view, number)?.switched { 2 } else { 0 });
    nvmlDeviceGetNvLinkRemotePciInfo_v2(number: c_uint, pci: *mut nvmlPciInfo_t) |view|
        put(pci, remote(view, number)?);
}
