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

/// The address of this machine on its default route, or else in one of its networks: private networks may have no default route.
pub(super) fn outward(listens: SocketAddr) -> Option<IpAddr> {
    if !listens.is_ipv4() {
        return source_towards(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into());
    }
    // Of a network that is reserved for documentation.
    source_towards(Ipv4Addr::new(192, 0, 2, 1).into()).or_else(|| {
        let routes = std::fs::read_to_string("/proc/self/net/route").ok()?;
        let found = in_networks(&routes).into_iter().filter_map(|other| source_towards(other.into()));
        found.into_iter().find(|own| !own.is_loopback())
    })
}

/// The address of this machine from which packets to `target` would come. None is sent.
fn source_towards(target: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((target, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// An address in each network of this machine, those of bridges for containers and virtual machines last. The table is that of the
/// kernel, whose addresses have the order of the network in memory.
fn in_networks(routes: &str) -> Vec<Ipv4Addr> {
    let mut networks: Vec<(bool, Ipv4Addr)> = routes
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (name, network) = (words.next()?, u32::from_str_radix(words.next()?, 16).ok()?);
            let is_bridge = ["docker", "br-", "virbr", "cni", "veth"].iter().any(|prefix| name.starts_with(prefix));
            let first = u32::from(Ipv4Addr::from(network.to_ne_bytes())) | 1;
            (network != 0).then(|| (is_bridge, Ipv4Addr::from(first)))
        })
        .collect();
    networks.sort_by_key(|(is_bridge, _)| *is_bridge);
    networks.into_iter().map(|(_, address)| address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_a_machine_are_those_of_its_routes_and_bridges_come_last() {
        let of = |address: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(address));
        let (bridge, network) = (of([172, 17, 0, 0]), of([10, 77, 0, 0]));
        let table = format!(
            "Iface\tDestination\tGateway\ndocker0\t{bridge}\t00000000\neth0\t{network}\t00000000\neth0\t00000000\t0100A8C0\n"
        );

        assert_eq!(in_networks(&table), [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(172, 17, 0, 1)]);
        assert_eq!(in_networks("Iface\tDestination\n"), [Ipv4Addr::UNSPECIFIED; 0]);
    }

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
