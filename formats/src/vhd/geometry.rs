//! Cylinders, heads and sectors of a VHD.

/// The geometry that a footer stores for BIOSes that still use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) cylinders: u16,
    pub(super) heads: u8,
    pub(super) sectors_per_track: u8,
}

/// The geometry of a disk of `total_sectors` ("Appendix: CHS Calculation"). It
/// may cover fewer sectors than the disk has; correct readers use the footer's
/// size instead.
pub(super) fn geometry(total_sectors: u64) -> Geometry {
    let total = total_sectors.min(65535 * 16 * 255);
    let (sectors, heads);
    if total >= 65535 * 16 * 63 {
        (sectors, heads) = (255, 16);
    } else if fits(total, 17, least_heads(total)) {
        (sectors, heads) = (17, least_heads(total));
    } else if fits(total, 31, 16) {
        (sectors, heads) = (31, 16);
    } else {
        (sectors, heads) = (63, 16);
    }
    // At most 65535: the first case at its cap, the last below its bound.
    let cylinders = (total / sectors / heads) as u16;
    Geometry { cylinders, heads: heads as u8, sectors_per_track: sectors as u8 }
}

fn least_heads(total: u64) -> u64 {
    (total / 17).div_ceil(1024).max(4)
}

/// Whether fewer than 1024 cylinders are enough.
fn fits(total: u64, sectors: u64, heads: u64) -> bool {
    heads <= 16 && total / sectors < heads * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(total: u64) -> (u16, u8, u8) {
        let found = geometry(total);
        (found.cylinders, found.heads, found.sectors_per_track)
    }

    #[test]
    fn follows_the_specification() {
        // 1 MiB, 1 GiB and 127 GiB as Windows and QEMU write them.
        assert_eq!(of(2048), (30, 4, 17));
        assert_eq!(of(2097152), (2080, 16, 63));
        assert_eq!(of(266338304), (65278, 16, 255));
        assert_eq!(of(u64::MAX), (65535, 16, 255));
        assert_eq!(of(1), (0, 4, 17));
    }

    #[test]
    fn never_covers_more_than_the_disk() {
        for total in (0..1 << 33).step_by(1_234_567) {
            let (cylinders, heads, sectors) = of(total);
            let covered = u64::from(cylinders) * u64::from(heads) * u64::from(sectors);
            assert!(covered <= total);
            assert!(total > 65535 * 16 * 255 || total - covered < 16 * 255);
        }
    }
}
