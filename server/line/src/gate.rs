//! How many connections may be there that have not proved a key yet.
//!
//! Strangers of many addresses can take all places. Peers get in all the same: addresses from which a line began have
//! places of their own.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Limit for all addresses together.
const MOST: usize = 256;
/// Limit for one address: a line has up to 34 connections, but few at once are in their handshake.
const MOST_OF_ONE: usize = 32;
/// Addresses of peers that are remembered.
const MOST_KNOWN: usize = 64;

/// Counts connections in their handshake.
#[derive(Default)]
pub(crate) struct Gate(Mutex<State>);

#[derive(Default)]
struct State {
    inside: HashMap<IpAddr, usize>,
    /// From which lines began, the newest first.
    known: VecDeque<IpAddr>,
}

/// The right to do a handshake; ends when it is dropped.
pub(crate) struct Pass {
    gate: Arc<Gate>,
    address: IpAddr,
}

impl Gate {
    /// Lets a connection in, if there is room.
    pub(crate) fn enter(self: &Arc<Gate>, address: IpAddr) -> Option<Pass> {
        let address = network(address);
        let mut state = self.0.lock();
        let total: usize = state.inside.values().sum();
        let of_one = state.inside.get(&address).copied().unwrap_or_default();
        let is_full = total >= MOST && !state.known.contains(&address);
        if is_full || of_one >= MOST_OF_ONE {
            return None;
        }
        state.inside.insert(address, of_one + 1);
        Some(Pass { gate: Arc::clone(self), address })
    }

    /// A line of a peer began from this address.
    pub(crate) fn know(&self, address: IpAddr) {
        let address = network(address);
        let known = &mut self.0.lock().known;
        known.retain(|other| *other != address);
        known.push_front(address);
        known.truncate(MOST_KNOWN);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let inside = &mut self.gate.0.lock().inside;
        let left = inside.remove(&self.address).unwrap_or(1) - 1;
        if left > 0 {
            inside.insert(self.address, left);
        }
    }
}

/// One host has a whole /64 of IPv6.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => IpAddr::V6((u128::from(six) >> 64 << 64).into()),
        four => four,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_cannot_take_all_and_room_comes_back() {
        let gate = Arc::<Gate>::default();
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let mut passes = Vec::new();
        for host in 0..MOST_OF_ONE {
            passes.push(gate.enter(address(&format!("2001:db8::{host:x}"))).expect("room"));
        }
        assert!(gate.enter(address("2001:db8::ffff")).is_none(), "the same /64");
        for other in 0..MOST - MOST_OF_ONE {
            passes.push(gate.enter(address(&format!("10.0.0.{other}"))).expect("room"));
        }
        assert!(gate.enter(address("10.1.0.1")).is_none(), "the limit of all");
        gate.know(address("10.1.0.2"));
        let places: Vec<_> = (0..=MOST_OF_ONE).map(|_| gate.enter(address("10.1.0.2"))).collect();
        assert_eq!(places.iter().flatten().count(), MOST_OF_ONE, "a peer has places of its own");
        drop(places);
        (0..MOST_KNOWN).for_each(|other| gate.know(address(&format!("10.2.0.{other}"))));
        assert!(gate.enter(address("10.1.0.2")).is_none(), "it was forgotten");
        passes.truncate(1);
        assert!(gate.enter(address("10.1.0.1")).is_some());
        passes.clear();
        assert!(gate.0.lock().inside.is_empty());
    }
}
