//! The owner of a page, a chunk or a layer.

/// One of: none, one point, one machine (several of its points), several
/// machines. It has four bytes, because there is one for every chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner(u32);

/// Set if the owner is a whole machine.
const MACHINE: u32 = 1 << 31;

/// The meaning of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Nobody,
    /// Number of the point, over all machines.
    Point(usize),
    /// Number of the machine.
    Machine(usize),
    Several,
}

impl Owner {
    pub(super) const NOBODY: Owner = Owner(0);
    const SEVERAL: Owner = Owner(u32::MAX);

    pub(super) fn point(number: u32) -> Owner {
        Owner((number + 1).min(MACHINE - 1))
    }

    pub(super) fn machine(number: u32) -> Owner {
        Owner(MACHINE | number)
    }

    /// The smallest owner that includes both. `machine_of_point` gives the
    /// machine of each point.
    #[inline]
    pub(super) fn with(self, other: Owner, machine_of_point: &[u32]) -> Owner {
        if self == other || other == Owner::NOBODY {
            return self;
        }
        if self == Owner::NOBODY {
            return other;
        }
        let machine = |owner: Owner| match owner.0 & MACHINE {
            0 => machine_of_point.get(owner.0 as usize - 1).copied().map(Owner::machine),
            _ => Some(owner),
        };
        match (machine(self), machine(other)) {
            (Some(one), Some(two)) if one == two => one,
            _ => Owner::SEVERAL,
        }
    }

    pub(super) fn whose(self) -> Whose {
        match self {
            Owner::NOBODY => Whose::Nobody,
            Owner::SEVERAL => Whose::Several,
            Owner(code) if code & MACHINE == 0 => Whose::Point(code as usize - 1),
            Owner(code) => Whose::Machine((code & !MACHINE) as usize),
        }
    }
}
