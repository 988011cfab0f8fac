//! The order of a machine's points by the states that they show.
//!
//! Names order points, except that a point of a time mark has the next number when it is sealed, and
//! may show an older state than points sealed before it.

/// The facts about a point that decide its place.
#[derive(Clone, Copy, Debug)]
pub struct StateTime {
    /// The time of its name, in seconds since 1970-01-01T00:00:00Z.
    pub name_seconds: u64,
    /// When it was stored or sealed, in milliseconds since then.
    pub created_at_ms: u64,
    /// The time of the mark that it shows, if it shows one.
    pub marked_at_ms: Option<u64>,
}

impl StateTime {
    fn shown_ms(&self) -> u64 {
        self.marked_at_ms.unwrap_or(self.created_at_ms)
    }
}

/// Points in the order of their states, the oldest first. `points` are in the order of their names.
/// A point of a mark is placed before the points of the same base that show later states; all others
/// keep their places.
pub fn order_states<T>(points: impl Iterator<Item = T>, of: impl Fn(&T) -> StateTime) -> Vec<T> {
    let mut ordered: Vec<(StateTime, T)> = Vec::with_capacity(points.size_hint().0);
    for point in points {
        let state = of(&point);
        let is_later = |other: &StateTime| {
            other.name_seconds == state.name_seconds && other.shown_ms() > state.shown_ms()
        };
        let later = match state.marked_at_ms {
            Some(_) => ordered.iter().rev().take_while(|(other, _)| is_later(other)).count(),
            None => 0,
        };
        ordered.insert(ordered.len() - later, (state, point));
    }
    ordered.into_iter().map(|(_, point)| point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_of_a_mark_is_before_points_of_later_states() {
        // The name's time, the seal, the mark.
        let points =
            [(10, 10, 0), (10, 100, 0), (10, 120, 90), (10, 130, 110), (10, 140, 95), (20, 20, 0)];
        let of = |(name_seconds, created_at_ms, mark): &(u64, u64, u64)| StateTime {
            name_seconds: *name_seconds,
            created_at_ms: *created_at_ms,
            marked_at_ms: Some(*mark).filter(|mark| *mark != 0),
        };
        let shown: Vec<u64> = order_states(points.into_iter(), of).iter().map(|p| p.1).collect();
        assert_eq!(shown, [10, 120, 140, 100, 130, 20]);
        // Clocks that were set do not move other points.
        let set = [(10, 10, 0), (10, 900, 0), (10, 50, 0)];
        assert_eq!(order_states(set.into_iter(), of), set);
    }
}
