//! A private network for one testbed: every 10.77.x.y is a local address, nothing else exists.
//!
//! Each simulated pod gets its own address without any interface work: the AnyIP route
//! `local 10.77.0.0/16 dev lo` lets a socket bind to any address of the range. The messages to the
//! kernel are encoded here by hand, because a fresh machine may lack iproute2.
//!
//! Invariants: called while the process has one thread ([`crate::contain`] sees to it), because
//! namespaces belong to threads; addresses are handed out by fixed plan ([`control_plane_address`],
//! [`node_address`], [`pod_address`]).

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

/// The range whose every address is local.
pub const RANGE: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 77, 0, 0), 16);

/// The address of etcd, the API server and the controllers.
#[must_use]
pub fn control_plane_address() -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, 1)
}

/// The address of the simulated node with this index (1–254).
#[must_use]
pub fn node_address(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, node, 1)
}

/// The address of the `slot`-th pod (0–243) of a node.
#[must_use]
pub fn pod_address(node: u8, slot: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, node, slot.saturating_add(10))
}

/// Why the private network could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A namespace was refused.
    #[error(
        "cannot {doing}: {source} (the testbed needs private network and mount namespaces: run it as root, \
         or allow unprivileged user namespaces)"
    )]
    Namespace {
        /// What was tried.
        doing: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The process already runs several threads, and namespaces belong to threads.
    #[error("namespaces must be entered while the process has one thread, it has {0}")]
    Threads(usize),
    /// The kernel refused a network message.
    #[error("cannot {doing}: {source}")]
    Netlink {
        /// What was asked for.
        doing: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// Leaves the host's network: a new network namespace with `lo` up and the range local.
///
/// Sockets that must be reachable from outside are bound before this call.
///
/// # Errors
/// When the process has several threads or the kernel refuses; the process must then give up.
pub fn enter() -> Result<(), Error> {
    let threads = threads();
    if threads > 1 {
        return Err(Error::Threads(threads));
    }
    unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| Error::Namespace {
        doing: "leave the network namespace",
        source: errno.into(),
    })?;
    bring_up_loopback()
}

/// Number of threads of this process.
pub(crate) fn threads() -> usize {
    fs::read_dir("/proc/self/task").map_or(1, Iterator::count)
}

fn bring_up_loopback() -> Result<(), Error> {
    request("bring lo up", RTM_NEWLINK, 0, &link_up())?;
    request(
        "make the range local",
        RTM_NEWROUTE,
        NLM_F_CREATE | NLM_F_REPLACE,
        &local_route(RANGE.0, RANGE.1),
    )
}

// Numbers of linux/netlink.h, linux/rtnetlink.h and linux/if.h.
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const NLMSG_HEADER: usize = 16;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWROUTE: u16 = 24;
const IFF_UP: u32 = 1;
/// `lo` is the first interface of a new network namespace.
const LOOPBACK: u32 = 1;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const AF_INET: u8 = 2;

/// `ifinfomsg` that sets the up flag of `lo`.
fn link_up() -> Vec<u8> {
    let mut body = vec![0_u8; 4]; // family, pad, type
    body.extend(LOOPBACK.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes()); // which flags change
    body
}

/// `rtmsg` with its attributes for `local ADDRESS/PREFIX dev lo`.
fn local_route(address: Ipv4Addr, prefix: u8) -> Vec<u8> {
    let mut body = vec![
        AF_INET,
        prefix,
        0,
        0,
        RT_TABLE_LOCAL,
        RTPROT_BOOT,
        RT_SCOPE_HOST,
        RTN_LOCAL,
        0,
        0,
        0,
        0,
    ];
    for (kind, value) in [(RTA_DST, address.octets()), (RTA_OIF, LOOPBACK.to_ne_bytes())] {
        body.extend(8_u16.to_ne_bytes()); // attribute length with its header
        body.extend(kind.to_ne_bytes());
        body.extend(value);
    }
    body
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(NLMSG_HEADER + body.len()).unwrap_or(u32::MAX);
    let mut message = Vec::with_capacity(NLMSG_HEADER + body.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
    message.extend(1_u32.to_ne_bytes()); // sequence
    message.extend(0_u32.to_ne_bytes()); // the kernel fills in our port
    message.extend(body);
    message
}

/// The error number of an acknowledgement, 0 for success.
fn acknowledgement(answer: &[u8]) -> Option<i32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let code = i32::from_ne_bytes(answer.get(NLMSG_HEADER..NLMSG_HEADER + 4)?.try_into().ok()?);
    (kind == NLMSG_ERROR).then_some(code)
}

fn request(doing: &'static str, kind: u16, flags: u16, body: &[u8]) -> Result<(), Error> {
    let failed = |source: std::io::Error| Error::Netlink { doing, source };
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )
    .map_err(|errno| failed(errno.into()))?;
    send(socket.as_raw_fd(), &message(kind, flags, body), MsgFlags::empty())
        .map_err(|errno| failed(errno.into()))?;
    let mut buffer = [0_u8; 4096];
    let length =
        recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).map_err(|errno| failed(errno.into()))?;
    match buffer.get(..length).and_then(acknowledgement) {
        Some(0) => Ok(()),
        Some(code) => Err(failed(std::io::Error::from_raw_os_error(-code))),
        None => Err(failed(std::io::Error::other(
            "the answer is not an acknowledgement",
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_message_has_the_kernels_layout() {
        let body = local_route(Ipv4Addr::new(10, 77, 0, 0), 16);
        let message = message(RTM_NEWROUTE, NLM_F_CREATE, &body);
        assert_eq!(message.len(), 16 + 12 + 8 + 8);
        assert_eq!(u32::from_ne_bytes(message[0..4].try_into().unwrap()), 44);
        assert_eq!(&message[16..24], &[2, 16, 0, 0, 255, 3, 254, 2]);
        assert_eq!(&message[32..36], &[10, 77, 0, 0]);
    }

    #[test]
    fn a_refusal_is_told_apart_from_success() {
        let mut answer = message(NLMSG_ERROR, 0, &0_i32.to_ne_bytes());
        assert_eq!(acknowledgement(&answer), Some(0));
        answer[16..20].copy_from_slice(&(-17_i32).to_ne_bytes());
        assert_eq!(acknowledgement(&answer), Some(-17));
        assert_eq!(acknowledgement(&[0; 3]), None);
    }
}
