//! Checks a copy of a disk against a proof.

use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Progress, Result};

use super::content::Content;
use super::proof::{DiskStatement, Proof};
use super::section::Hashing;

/// The result for one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyCheck {
    /// Sections that were read.
    pub checked: u64,
    /// All sections of the disk.
    pub sections: u64,
    /// Bytes of one section.
    pub section_bytes: u64,
    /// Offsets of the sections that differ, ascending.
    pub differing: Vec<u64>,
}

/// Reads a copy of the disk and compares it with the proof: the whole, or `percent` of its sections, chosen
/// at random, at least one.
///
/// # Errors
/// `Corrupt` if the copy has another size, `InvalidInput` for a percentage outside of 0 to 100; errors of
/// the copy.
pub fn check_copy(
    proof: &Proof,
    disk: &DiskStatement,
    copy: &Content<'_>,
    percent: Option<f64>,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<CopyCheck> {
    let (size, there) = (disk.size_bytes, copy.size_bytes());
    if there != size && there != copy.rounded(size) {
        let text = format!("{}: the copy has {there} bytes, and the proof says {size}", disk.disk);
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    let Some(sections) = proof.sections.get(&disk.disk) else {
        return Err(Error::new(ErrorKind::Internal, "a disk without sections"));
    };
    let all = sections.hashes.len() as u64;
    let numbers = chosen(all, percent)?;
    let section_bytes = sections.section_bytes;
    let name = disk.disk.as_str();
    let hashing =
        Hashing { content: copy, name, size_bytes: size, section_bytes, progress, cancel };
    let hashes = hashing.hash(&numbers)?;
    let differs = |(number, hash): &(&u64, &[u8; 32])| sections.hashes[**number as usize] != **hash;
    let differing = numbers.iter().zip(&hashes).filter(differs);
    Ok(CopyCheck {
        checked: numbers.len() as u64,
        sections: all,
        section_bytes,
        differing: differing.map(|(number, _)| number * section_bytes).collect(),
    })
}

/// The numbers of the sections to read, ascending.
fn chosen(all: u64, percent: Option<f64>) -> Result<Vec<u64>> {
    let mut numbers: Vec<u64> = (0..all).collect();
    let Some(percent) = percent else { return Ok(numbers) };
    if !(percent > 0.0 && percent <= 100.0) {
        let text = "a sample has more than 0 and at most 100 percent";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let count = ((all as f64 * percent / 100.0).ceil() as usize).clamp(1, numbers.len().max(1));
    let mut random = vec![0; 8 * count];
    aws_lc_rs::rand::fill(&mut random)
        .map_err(|_| Error::new(ErrorKind::Internal, "the system gave no random numbers"))?;
    // The first steps of a shuffle.
    for (index, bytes) in random.chunks_exact(8).enumerate() {
        let number = bytes.iter().fold(0, |number: u64, byte| (number << 8) | u64::from(*byte));
        let left = (numbers.len() - index) as u64;
        numbers.swap(index, index + (number % left) as usize);
    }
    numbers.truncate(count);
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::chosen;

    #[test]
    fn samples_are_distinct_and_of_the_asked_size() {
        assert_eq!(chosen(3, None).unwrap(), [0, 1, 2]);
        assert_eq!(chosen(3, Some(100.0)).unwrap(), [0, 1, 2]);
        assert_eq!(chosen(1000, Some(0.001)).unwrap().len(), 1);
        let mut sample = chosen(1000, Some(5.0)).unwrap();
        assert!(sample.windows(2).all(|pair| pair[0] < pair[1]));
        sample.extend(chosen(1000, Some(5.0)).unwrap());
        sample.sort_unstable();
        sample.dedup();
        assert!(sample.len() > 60, "two samples are the same: {}", sample.len());
        for percent in [0.0, -1.0, 100.1, f64::NAN] {
            assert!(chosen(10, Some(percent)).is_err());
        }
    }
}
