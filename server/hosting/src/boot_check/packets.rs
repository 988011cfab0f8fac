//! The packets that a machine sends, from QEMU's dump of its isolated network.

use std::path::PathBuf;

use coldrise_host::Host;

/// Length of the dump's own header.
const FILE_HEADER_BYTES: u64 = 24;
const RECORD_HEADER_BYTES: usize = 16;
/// QEMU writes at most this many bytes of each packet.
pub(crate) const MAX_PACKET_BYTES: usize = 128;
/// At a larger file the dump has to start again.
pub(crate) const MAX_FILE_BYTES: u64 = 4 << 20;
/// Sender addresses of QEMU's own packets begin with these bytes.
const QEMU_SENDER: [u8; 2] = [0x52, 0x55];

/// The packets of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// A question for an address by DHCP.
    Dhcp,
    Arp,
    /// An IPv6 router solicitation.
    RouterSolicitation,
    /// A TCP connection to this port of the machine is accepted.
    Accepted(u16),
    Other,
}

/// A reader of the growing dump.
pub(crate) struct Packets {
    host: Host,
    path: PathBuf,
    /// The end of the records that are read.
    offset: u64,
}

impl Packets {
    /// Of a dump on QEMU's host.
    pub(super) fn new(host: Host, path: PathBuf) -> Packets {
        Packets { host, path, offset: FILE_HEADER_BYTES }
    }

    /// The machine's packets since the last call. An unreadable dump is empty.
    pub(super) fn read(&mut self) -> Vec<Sent> {
        let read = self.host.read_from(&self.path, self.offset, MAX_FILE_BYTES);
        let bytes = read.unwrap_or_default();
        let (sent, used) = parse(&bytes);
        self.offset += used as u64;
        sent
    }

    /// Whether the dump is so large that it has to start again.
    pub(crate) fn is_full(&self) -> bool {
        self.offset > MAX_FILE_BYTES
    }

    /// The dump has started again.
    pub(super) fn restart(&mut self) {
        self.offset = FILE_HEADER_BYTES;
    }
}

/// The whole records at the beginning of `bytes`, and their length.
fn parse(bytes: &[u8]) -> (Vec<Sent>, usize) {
    let (mut sent, mut used) = (Vec::new(), 0);
    while let Some(header) = bytes.get(used..used + RECORD_HEADER_BYTES) {
        // Seconds, microseconds, length here, length on the network: in this host's byte order.
        let Some(length) = header.get(8..12).and_then(|field| field.try_into().ok()) else { break };
        let length = u32::from_ne_bytes(length) as usize;
        let start = used + RECORD_HEADER_BYTES;
        // A longer record is not QEMU's: nothing after it can be read.
        let Some(packet) = bytes.get(start..start + length.min(MAX_FILE_BYTES as usize)) else {
            break;
        };
        sent.extend(classify(packet));
        used = start + packet.len();
    }
    (sent, used)
}

/// `None` for QEMU's own packets and for what is too short.
fn classify(packet: &[u8]) -> Option<Sent> {
    let sender = packet.get(6..12)?;
    if sender.starts_with(&QEMU_SENDER) {
        return None;
    }
    let number = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
    let special = || match number(12)? {
        0x0806 => Some(Sent::Arp),
        0x0800 => {
            let segment = 14 + usize::from(packet.get(14)? & 0x0f) * 4;
            match packet.get(23)? {
                // From the client's port to the server's.
                17 if (number(segment)?, number(segment + 2)?) == (68, 67) => Some(Sent::Dhcp),
                // SYN and ACK, not RST.
                6 if packet.get(segment + 13)? & 0x16 == 0x12 => {
                    Some(Sent::Accepted(number(segment)?))
                }
                _ => None,
            }
        }
        0x86dd if (packet.get(20)?, packet.get(54)?) == (&58, &133) => {
            Some(Sent::RouterSolicitation)
        }
        _ => None,
    };
    Some(special().unwrap_or(Sent::Other))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
    const QEMU: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];

    fn packet(sender: [u8; 6], kind: u16, rest: &[u8]) -> Vec<u8> {
        [&[0xff; 6], &sender[..], &kind.to_be_bytes(), rest].concat()
    }

    fn ipv4(protocol: u8, segment: &[u8]) -> Vec<u8> {
        let mut header = [0; 24];
        // Six words: with an option.
        header[0] = 0x46;
        header[9] = protocol;
        packet(MACHINE, 0x0800, &[&header[..], segment].concat())
    }

    fn tcp(flags: u8) -> Vec<u8> {
        let mut segment = [0; 20];
        segment[1] = 22;
        segment[13] = flags;
        ipv4(6, &segment)
    }

    fn record(packet: &[u8]) -> Vec<u8> {
        let length = (packet.len() as u32).to_ne_bytes();
        [&[0; 8], &length[..], &length[..], packet].concat()
    }

    #[test]
    fn packets_are_distinguished() {
        let mut solicitation = packet(MACHINE, 0x86dd, &[0; 41]);
        (solicitation[20], solicitation[54]) = (58, 133);
        for (packet, expected) in [
            (ipv4(17, &[0, 68, 0, 67]), Some(Sent::Dhcp)),
            (ipv4(17, &[0, 67, 0, 68]), Some(Sent::Other)),
            (packet(MACHINE, 0x0806, &[]), Some(Sent::Arp)),
            (solicitation, Some(Sent::RouterSolicitation)),
            (tcp(0x12), Some(Sent::Accepted(22))),
            // A refusal.
            (tcp(0x14), Some(Sent::Other)),
            (packet(QEMU, 0x0806, &[]), None),
            (packet(MACHINE, 0x0800, &[0x4f]), Some(Sent::Other)),
            (vec![1; 5], None),
        ] {
            assert_eq!(classify(&packet), expected, "{packet:?}");
        }
    }

    #[test]
    fn a_dump_is_read_while_it_grows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dump");
        let mut packets = Packets::new(Host::here(), path.clone());
        assert_eq!(packets.read(), []);
        let whole =
            [vec![0; 24], record(&tcp(0x12)), record(&packet(MACHINE, 0x0806, &[]))].concat();
        let mut seen = Vec::new();
        for length in 0..=whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            seen.extend(packets.read());
        }
        assert_eq!(seen, [Sent::Accepted(22), Sent::Arp]);
        assert!(!packets.is_full());
        // A length that cannot be.
        let hostile = [&whole[..], &[0xff; 16]].concat();
        std::fs::write(&path, &hostile).unwrap();
        assert_eq!(packets.read(), []);
        // A link, as a guest that broke out could make it.
        let elsewhere = folder.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        packets.restart();
        assert_eq!(packets.read(), []);
    }
}
