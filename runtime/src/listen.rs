//! Listening addresses that work in every pod: `[::]` with a fallback to IPv4, hosts without brackets.
//!
//! Inputs: `host:port` from a flag. Invariants: the port follows the last colon, so the downward API's bare
//! pod IP works (`$(POD_IP):9410` with an IPv6 pod); a wildcard falls back only where IPv6 is off, never
//! because the port is taken.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::str::FromStr;

/// `EAFNOSUPPORT` on Linux: the kernel was built or booted without IPv6.
const EAFNOSUPPORT: i32 = 97;

/// A parsed `host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddr {
    host: Host,
    port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    Ip(IpAddr),
    Name(String),
}

/// Why an address was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddrError {
    /// There is no colon, or nothing follows it.
    #[error("{0:?} has no port; write host:port, for example [::]:9410")]
    NoPort(String),
    /// The part after the last colon is no port number.
    #[error("{port:?} in {text:?} is not a port from 0 to 65535")]
    BadPort {
        /// The whole text.
        text: String,
        /// The part after the last colon.
        port: String,
    },
    /// The host is neither an address nor a name.
    #[error("{0:?} has a host that is neither an IP address nor a host name")]
    BadHost(String),
}

impl ListenAddr {
    /// Any address of this machine, IPv6 and IPv4; port 0 lets the kernel choose.
    #[must_use]
    pub const fn any(port: u16) -> Self {
        Self {
            host: Host::Ip(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
            port,
        }
    }

    /// The IPv4 loopback address; port 0 lets the kernel choose.
    #[must_use]
    pub const fn loopback(port: u16) -> Self {
        Self {
            host: Host::Ip(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            port,
        }
    }

    /// The port, 0 for one of the kernel's choice.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Whether only this machine can connect.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            Host::Ip(ip) => ip.is_loopback(),
            Host::Name(name) => name == "localhost",
        }
    }

    fn candidates(&self) -> io::Result<Vec<SocketAddr>> {
        match &self.host {
            Host::Ip(ip) => Ok(vec![SocketAddr::new(*ip, self.port)]),
            Host::Name(name) => Ok((name.as_str(), self.port).to_socket_addrs()?.collect()),
        }
    }
}

impl FromStr for ListenAddr {
    type Err = AddrError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((host, port)) = text.rsplit_once(':').filter(|(_, port)| !port.is_empty()) else {
            return Err(AddrError::NoPort(text.to_owned()));
        };
        let port = port.parse().map_err(|_| AddrError::BadPort {
            text: text.to_owned(),
            port: port.to_owned(),
        })?;
        let bare = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host);
        let host = if bare.is_empty() {
            Host::Ip(IpAddr::V6(Ipv6Addr::UNSPECIFIED))
        } else if let Ok(ip) = bare.parse::<IpAddr>() {
            Host::Ip(ip)
        } else if bare
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-')
        {
            Host::Name(bare.to_owned())
        } else {
            return Err(AddrError::BadHost(text.to_owned()));
        };
        Ok(Self { host, port })
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Binds the address, non-blocking, ready for an async runtime.
///
/// # Errors
/// The system's error with the address in its text. Where IPv6 is off, `[::]` becomes `0.0.0.0` first.
pub fn bind(addr: &ListenAddr) -> io::Result<TcpListener> {
    let listener = bind_with(addr, TcpListener::bind::<SocketAddr>)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// [`bind`] with the system call passed in.
fn bind_with<T>(addr: &ListenAddr, mut bind_one: impl FnMut(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for candidate in addr.candidates()? {
        match bind_one(candidate) {
            Ok(bound) => return Ok(bound),
            Err(error) if candidate.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && ipv6_is_off(&error) => {
                let v4 = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), candidate.port());
                return bind_one(v4).map_err(|error| named(addr, &error));
            }
            Err(error) => last = error,
        }
    }
    Err(named(addr, &last))
}

fn ipv6_is_off(error: &io::Error) -> bool {
    error.raw_os_error() == Some(EAFNOSUPPORT) || error.kind() == io::ErrorKind::AddrNotAvailable
}

fn named(addr: &ListenAddr, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("listening on {addr}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        text.parse::<ListenAddr>().unwrap().to_string()
    }

    #[test]
    fn the_port_follows_the_last_colon() {
        assert_eq!(parsed("[::]:9410"), "[::]:9410");
        assert_eq!(parsed(":::9410"), "[::]:9410");
        assert_eq!(parsed("fd00::5:9410"), "[fd00::5]:9410");
        assert_eq!(parsed("10.77.0.3:9410"), "10.77.0.3:9410");
        assert_eq!(parsed("localhost:0"), "localhost:0");
        assert_eq!(parsed(":9410"), "[::]:9410");
    }

    #[test]
    fn bad_addresses_say_what_is_wrong() {
        let error = |text: &str| text.parse::<ListenAddr>().unwrap_err().to_string();
        assert!(error("localhost").contains("has no port"));
        assert!(error("10.0.0.1:").contains("has no port"));
        assert!(error("10.0.0.1:99999").contains("99999"));
        assert!(error("http://x:80").contains("neither"));
    }

    #[test]
    fn wildcard_falls_back_to_ipv4_where_ipv6_is_off() {
        for off in [
            io::Error::from_raw_os_error(EAFNOSUPPORT),
            io::ErrorKind::AddrNotAvailable.into(),
        ] {
            let mut off = Some(off);
            let bound = bind_with(&ListenAddr::any(7), |addr| match addr {
                SocketAddr::V6(_) => Err(off.take().unwrap()),
                SocketAddr::V4(_) => Ok(addr),
            });
            assert_eq!(bound.unwrap().to_string(), "0.0.0.0:7");
        }
    }

    #[test]
    fn a_taken_port_does_not_fall_back() {
        let mut tried = Vec::new();
        let bound: io::Result<()> = bind_with(&ListenAddr::any(7), |addr| {
            tried.push(addr.to_string());
            Err(io::ErrorKind::AddrInUse.into())
        });
        assert_eq!(bound.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(tried, ["[::]:7"]);
    }

    #[test]
    fn an_explicit_ipv6_address_does_not_fall_back() {
        let addr: ListenAddr = "[fd00::5]:7".parse().unwrap();
        let bound: io::Result<()> = bind_with(&addr, |_| Err(io::ErrorKind::AddrNotAvailable.into()));
        assert!(bound.unwrap_err().to_string().contains("[fd00::5]:7"));
    }

    #[test]
    fn a_kernel_chosen_port_can_be_connected_to() {
        let listener = bind(&ListenAddr::loopback(0)).unwrap();
        let addr = listener.local_addr().unwrap();
        assert_ne!(addr.port(), 0);
        assert!(std::net::TcpStream::connect(addr).is_ok());
    }

    #[test]
    fn loopback_is_known() {
        assert!("127.0.0.1:1".parse::<ListenAddr>().unwrap().is_loopback());
        assert!("localhost:1".parse::<ListenAddr>().unwrap().is_loopback());
        assert!(!"[::]:1".parse::<ListenAddr>().unwrap().is_loopback());
    }
}
