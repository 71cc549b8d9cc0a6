//! The addresses at which nodes find a coordinator.

use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::trust::join::Address;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// The addresses for nodes: the configured ones, or the one that it listens at. At all addresses of this machine, that is the
/// address on the route that `outward` returns.
pub(super) fn advertised(
    listens: SocketAddr,
    configured: &[Address],
    outward: impl FnOnce(SocketAddr) -> Option<IpAddr>,
) -> Result<Vec<Address>, ControlPlaneError> {
    if !configured.is_empty() {
        let with_port =
            |a: &Address| if a.port == 0 { Address { port: listens.port(), ..a.clone() } } else { a.clone() };
        return Ok(configured.iter().map(with_port).collect());
    }
    if !listens.ip().is_unspecified() {
        return Ok(vec![listens.into()]);
    }
    let ip = outward(listens).ok_or(ControlPlaneError::NoAdvertise { listens })?;
    Ok(vec![SocketAddr::new(ip, listens.port()).into()])
}

/// The address of this machine on its default route. No packet is sent; the targets are reserved for documentation.
pub(super) fn outward(listens: SocketAddr) -> Option<IpAddr> {
    let (any, target): (SocketAddr, SocketAddr) = if listens.is_ipv4() {
        ((Ipv4Addr::UNSPECIFIED, 0).into(), (Ipv4Addr::new(192, 0, 2, 1), 9).into())
    } else {
        ((Ipv6Addr::UNSPECIFIED, 0).into(), (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into())
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(target).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertised_address_is_one_that_other_machines_can_reach() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let route = |_| Some(IpAddr::from([10, 1, 2, 3]));
        let of = |listens, configured: &[&str], route: fn(SocketAddr) -> Option<IpAddr>| {
            let configured: Vec<Address> = configured.iter().map(|text| text.parse().unwrap()).collect();
            let found = advertised(at(listens), &configured, route);
            found.map(|all| all.iter().map(Address::to_string).collect::<Vec<_>>().join(","))
        };

        assert_eq!(of("10.9.9.9:7070", &[], route).unwrap(), "10.9.9.9:7070");
        assert_eq!(of("0.0.0.0:7070", &[], route).unwrap(), "10.1.2.3:7070");
        assert_eq!(of("0.0.0.0:7070", &["head:7070", "b:7071"], route).unwrap(), "head:7070,b:7071");
        let refused = of("[::]:7070", &[], |_| None).unwrap_err();
        assert!(refused.to_string().contains("--advertise"), "{refused}");
    }
}
