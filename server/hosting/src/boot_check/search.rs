//! The search for the last good point, without machines: what to boot next, and the answer.
//!
//! Invariant: every point up to `low` counts as good and every point from `high` on as bad. A round
//! asks points in between, and each answer moves one of the two. An unproven point moves neither,
//! and is not asked again. So each round of N points leaves at most 1 of N+1 parts, or one unproven
//! point more.

/// The result of a boot for a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It boots.
    Good,
    /// Something proves that it fails.
    Bad,
    /// Neither.
    Unproven,
}

/// A search among points in the order of time, named by their number.
#[derive(Clone, Debug)]
pub struct Search {
    answers: Vec<Option<Answer>>,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The newest point that is good.
    pub last_good: Option<usize>,
    /// The oldest point after it that is bad.
    pub first_bad: Option<usize>,
    /// Unproven points between the two; without one of the two, up to that end.
    pub unproven: Vec<usize>,
}

impl Search {
    /// Nothing is known about any of `count` points.
    pub fn new(count: usize) -> Search {
        Search { answers: vec![None; count] }
    }

    /// Enters an answer.
    pub fn enter(&mut self, point: usize, answer: Answer) {
        if let Some(known) = self.answers.get_mut(point) {
            *known = Some(answer);
        }
    }

    /// At most `most` points to ask next; none if the search has ended. They split the unasked
    /// points evenly.
    pub fn next(&self, most: usize) -> Vec<usize> {
        let unasked: Vec<usize> =
            self.between().filter(|point| self.answer(*point).is_none()).collect();
        let count = most.max(1).min(unasked.len());
        let place = |part: usize| (unasked.len() + 1) * part / (count + 1) - 1;
        (1..=count).filter_map(|part| unasked.get(place(part)).copied()).collect()
    }

    /// The number of points that may still be asked.
    pub fn unasked(&self) -> usize {
        self.between().filter(|point| self.answer(*point).is_none()).count()
    }

    /// The result so far.
    pub fn outcome(&self) -> Outcome {
        let (last_good, first_bad) = self.ends();
        let unproven =
            self.between().filter(|point| self.answer(*point) == Some(Answer::Unproven)).collect();
        Outcome { last_good, first_bad, unproven }
    }

    fn answer(&self, point: usize) -> Option<Answer> {
        self.answers.get(point).copied().flatten()
    }

    /// The newest good point, and the oldest bad one after it. A point that boots is an answer
    /// though an older one does not boot.
    fn ends(&self) -> (Option<usize>, Option<usize>) {
        let is = |answer| move |known: &Option<Answer>| *known == Some(answer);
        let low = self.answers.iter().rposition(is(Answer::Good));
        let after = low.map_or(0, |low| low + 1);
        let rest = self.answers.iter().skip(after);
        let high = rest.clone().position(|known| is(Answer::Bad)(known));
        (low, high.map(|high| high + after))
    }

    fn between(&self) -> std::ops::Range<usize> {
        let (low, high) = self.ends();
        low.map_or(0, |low| low + 1)..high.unwrap_or(self.answers.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Asks until the search ends. Returns the outcome and the number of rounds.
    fn run(answers: &[Answer], at_once: usize) -> (Outcome, usize) {
        let mut search = Search::new(answers.len());
        let mut asked = std::collections::HashSet::new();
        let mut rounds = 0;
        loop {
            let next = search.next(at_once);
            if next.is_empty() {
                return (search.outcome(), rounds);
            }
            rounds += 1;
            assert!(next.len() <= at_once);
            for point in next {
                assert!(asked.insert(point), "{point} is asked twice");
                search.enter(point, answers[point]);
            }
        }
    }

    /// The rounds that the answers allow: one for each split, and one for each unproven point.
    fn bound(answers: &[Answer], at_once: usize) -> usize {
        let unproven = answers.iter().filter(|answer| **answer == Answer::Unproven).count();
        let (mut left, mut rounds) = (answers.len(), 0);
        while left > 0 {
            left = (left + 1).div_ceil(at_once + 1) - 1;
            rounds += 1;
        }
        rounds + unproven
    }

    fn any_answer() -> impl Strategy<Value = Answer> {
        prop_oneof![Just(Answer::Good), Just(Answer::Bad), Just(Answer::Unproven)]
    }

    #[test]
    fn twenty_points_need_five_rounds() {
        for bad in 0..=20_usize {
            let answers: Vec<Answer> =
                (0..20).map(|i| if i < bad { Answer::Good } else { Answer::Bad }).collect();
            let (outcome, rounds) = run(&answers, 1);
            assert!(rounds <= 5, "{rounds} rounds");
            assert_eq!(outcome.last_good, bad.checked_sub(1));
            assert_eq!(outcome.first_bad, Some(bad).filter(|bad| *bad < 20));
            assert!(run(&answers, 4).1 <= 2);
        }
    }

    #[test]
    fn known_answers_leave_less_to_ask() {
        let mut search = Search::new(20);
        search.enter(9, Answer::Good);
        search.enter(12, Answer::Bad);
        assert_eq!(search.unasked(), 2);
        assert_eq!(search.next(8), [10, 11]);
        search.enter(10, Answer::Unproven);
        assert_eq!(search.next(1), [11]);
        search.enter(11, Answer::Bad);
        let outcome = Outcome { last_good: Some(9), first_bad: Some(11), unproven: vec![10] };
        assert_eq!(search.outcome(), outcome);
    }

    proptest! {
        #[test]
        fn any_answers_come_to_an_end(
            answers in prop::collection::vec(any_answer(), 0..60),
            at_once in 1..9_usize,
        ) {
            let (outcome, rounds) = run(&answers, at_once);
            prop_assert!(rounds <= bound(&answers, at_once), "{} rounds", rounds);
            for (point, answer) in [(outcome.last_good, Answer::Good), (outcome.first_bad, Answer::Bad)] {
                prop_assert!(point.is_none_or(|point| answers[point] == answer));
            }
            let low = outcome.last_good.map_or(0, |low| low + 1);
            let high = outcome.first_bad.unwrap_or(answers.len());
            prop_assert!(low <= high);
            // Nothing in between is left unasked.
            prop_assert_eq!(outcome.unproven, (low..high).collect::<Vec<_>>());
        }

        #[test]
        fn the_answer_is_right_where_good_points_are_older(
            good in 0..40_usize,
            bad in 0..40_usize,
            unproven in prop::collection::hash_set(0..80_usize, 0..20),
            at_once in 1..9_usize,
        ) {
            let answers: Vec<Answer> = (0..good + bad)
                .map(|point| match (unproven.contains(&point), point < good) {
                    (true, _) => Answer::Unproven,
                    (false, true) => Answer::Good,
                    (false, false) => Answer::Bad,
                })
                .collect();
            let (outcome, _) = run(&answers, at_once);
            let good = answers.iter().rposition(|answer| *answer == Answer::Good);
            let bad = answers.iter().position(|answer| *answer == Answer::Bad);
            prop_assert_eq!((outcome.last_good, outcome.first_bad), (good, bad));
        }
    }
}
