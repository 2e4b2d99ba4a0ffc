//! Which addresses a stranger's URL may lead to: public unicast ones, and no others.
//!
//! Pure. What is asked about is the address that is about to be connected to, so that neither the spelling of a host nor what its name
//! meant a moment ago matters.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Blocks that are not the public Internet: IANA's registry of special-purpose addresses, multicast, and what is reserved; and one
/// address of clouds' metadata that is in none of these.
const NOT_PUBLIC_V4: &[([u8; 4], u8)] = &[
    ([0, 0, 0, 0], 8),        // this network
    ([10, 0, 0, 0], 8),       // private
    ([100, 64, 0, 0], 10),    // shared by the customers of a provider
    ([127, 0, 0, 0], 8),      // loopback
    ([169, 254, 0, 0], 16),   // link-local, metadata of clouds among them
    ([168, 63, 129, 16], 32), // the host of a machine at Azure, metadata among what it tells
    ([172, 16, 0, 0], 12),    // private
    ([192, 0, 0, 0], 24),     // protocol assignments
    ([192, 0, 2, 0], 24),     // documentation
    ([192, 88, 99, 0], 24),   // relays of 6to4, given up
    ([192, 168, 0, 0], 16),   // private
    ([198, 18, 0, 0], 15),    // benchmarks
    ([198, 51, 100, 0], 24),  // documentation
    ([203, 0, 113, 0], 24),   // documentation
    ([224, 0, 0, 0], 4),      // multicast
    ([240, 0, 0, 0], 4),      // reserved, broadcast
];

/// What is no public unicast address within 2000::/3; outside of it nothing is, but for v4 addresses behind a translator.
const NOT_PUBLIC_V6: &[([u16; 8], u8)] = &[
    ([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), // protocol assignments: Teredo, ORCHID, benchmarks
    ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), // documentation
    ([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), // 6to4: any v4 address may be inside
    ([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), // documentation
];
const GLOBAL_UNICAST: ([u16; 8], u8) = ([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// A v4 address in the form of v6, and one behind the well-known translator, NAT64.
const WITH_V4_INSIDE: &[([u16; 8], u8)] = &[
    ([0, 0, 0, 0, 0, 0xffff, 0, 0], 96),
    ([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96),
];

/// Whether an address is one of the public Internet.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !NOT_PUBLIC_V4.iter().any(|&(block, length)| {
        let mask = u32::MAX << (32 - u32::from(length));
        address.to_bits() & mask == Ipv4Addr::from(block).to_bits()
    })
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let is_in = |&(block, length): &([u16; 8], u8)| {
        let mask = u128::MAX << (128 - u32::from(length));
        address.to_bits() & mask == Ipv6Addr::from(block).to_bits()
    };
    if WITH_V4_INSIDE.iter().any(is_in) {
        let [.., a, b, c, d] = address.octets();
        return is_public_v4(Ipv4Addr::new(a, b, c, d));
    }
    is_in(&GLOBAL_UNICAST) && !NOT_PUBLIC_V6.iter().any(is_in)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn public(address: &str) -> bool {
        is_public(address.parse().unwrap())
    }

    #[test]
    fn the_first_and_the_last_of_each_block_and_their_neighbours() {
        for (before, first, last, behind) in [
            (None, "0.0.0.0", "0.255.255.255", Some("1.0.0.0")),
            (
                Some("9.255.255.255"),
                "10.0.0.0",
                "10.255.255.255",
                Some("11.0.0.0"),
            ),
            (
                Some("100.63.255.255"),
                "100.64.0.0",
                "100.127.255.255",
                Some("100.128.0.0"),
            ),
            (
                Some("126.255.255.255"),
                "127.0.0.0",
                "127.255.255.255",
                Some("128.0.0.0"),
            ),
            (
                Some("169.253.255.255"),
                "169.254.0.0",
                "169.254.255.255",
                Some("169.255.0.0"),
            ),
            (
                Some("168.63.129.15"),
                "168.63.129.16",
                "168.63.129.16",
                Some("168.63.129.17"),
            ),
            (
                Some("172.15.255.255"),
                "172.16.0.0",
                "172.31.255.255",
                Some("172.32.0.0"),
            ),
            (
                Some("191.255.255.255"),
                "192.0.0.0",
                "192.0.0.255",
                Some("192.0.1.0"),
            ),
            (
                Some("192.0.1.255"),
                "192.0.2.0",
                "192.0.2.255",
                Some("192.0.3.0"),
            ),
            (
                Some("192.88.98.255"),
                "192.88.99.0",
                "192.88.99.255",
                Some("192.88.100.0"),
            ),
            (
                Some("192.167.255.255"),
                "192.168.0.0",
                "192.168.255.255",
                Some("192.169.0.0"),
            ),
            (
                Some("198.17.255.255"),
                "198.18.0.0",
                "198.19.255.255",
                Some("198.20.0.0"),
            ),
            (
                Some("198.51.99.255"),
                "198.51.100.0",
                "198.51.100.255",
                Some("198.51.101.0"),
            ),
            (
                Some("203.0.112.255"),
                "203.0.113.0",
                "203.0.113.255",
                Some("203.0.114.0"),
            ),
            (
                Some("223.255.255.255"),
                "224.0.0.0",
                "255.255.255.255",
                None,
            ),
        ] {
            assert!(!public(first), "{first}");
            assert!(!public(last), "{last}");
            for neighbour in [before, behind].into_iter().flatten() {
                assert!(public(neighbour), "{neighbour}");
            }
        }
    }

    #[test]
    fn of_v6_only_global_unicast() {
        for address in [
            "2000::1",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2003::1",
            "2606:4700:4700::1111",
            "2a00:1450:4001::1",
            "3ffe:ffff::1",
        ] {
            assert!(public(address), "{address}");
        }
        for address in [
            "::",
            "::1",
            "::2",
            "1::1",
            "100::1",
            "64:ff9b:1::808:808",
            "2001::1",
            "2001:0:808:808::1",
            "2001:2::1",
            "2001:10::1",
            "2001:1ff:ffff::1",
            "2001:db8::1",
            "2001:db8:ffff:ffff::1",
            "2002::1",
            "2002:7f00:1::1",
            "2002:808:808::1",
            "3fff::1",
            "3fff:fff:ffff::1",
            "4000::1",
            "5f00::1",
            "8000::1",
            "fc00::1",
            "fd00:ec2::254",
            "fdff::1",
            "fe80::1",
            "fe80::a9fe:a9fe",
            "febf::1",
            "fec0::1",
            "ff00::1",
            "ff02::1",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
        ] {
            assert!(!public(address), "{address}");
        }
    }

    #[test]
    fn v4_in_v6_is_what_is_inside() {
        for (inside, is_public) in [
            ("127.0.0.1", false),
            ("10.0.0.1", false),
            ("169.254.169.254", false),
            ("192.168.1.1", false),
            ("0.0.0.0", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("8.8.8.8", true),
        ] {
            for outside in ["::ffff:", "64:ff9b::"] {
                let address = format!("{outside}{inside}");
                assert_eq!(public(&address), is_public, "{address}");
            }
            // Given up, and understood by some all the same.
            assert!(!public(&format!("::{inside}")), "::{inside}");
        }
    }

    #[test]
    fn every_spelling_of_a_host_comes_to_one_address() {
        for host in [
            "127.0.0.1",
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "017700000001",
            "127.0.0.1.",
            "%31%32%37.0.0.1",
            "１２７.０.０.１",
            "127。0。0。1",
            "[::1]",
            "[0:0:0:0:0:0:0:1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[::127.0.0.1]",
            "0",
            "169.254.169.254",
            "2852039166",
            "[fd00:ec2::254]",
        ] {
            let url = url::Url::parse(&format!("https://{host}/")).unwrap();
            let address = match url.host() {
                Some(url::Host::Ipv4(address)) => IpAddr::V4(address),
                Some(url::Host::Ipv6(address)) => IpAddr::V6(address),
                other => panic!("{host}: {other:?}"),
            };
            assert!(!is_public(address), "{host}");
        }
    }
}
