//! Proof that boxes do not overlap, in time n log^(d−1) n for n boxes in d dimensions, whatever they are.
//!
//! Two boxes overlap exactly when, in every dimension, one of them begins inside the other. So the boxes
//! are looked at as intervals and as points (where they begin), dimension by dimension, as in Zomorodian
//! and Edelsbrunner, "Fast software for box intersections" (2000): intervals that hold all points leave
//! the dimension decided, and the next is looked at; the others go on with the points on their side of the
//! median. The search ends with the first overlap, so it never costs more than when there is none.

/// With so few boxes on one side every pair is compared.
const FEW: usize = 8;

/// The places of two boxes that overlap; a box is its offset, then its shape, none of it 0.
pub(super) fn find_overlap(ndim: usize, boxes: &[u64]) -> Option<(usize, usize)> {
    if ndim == 0 {
        return None; // one element, and boxes without words cannot be counted
    }
    let all: Vec<usize> = (0..boxes.len() / (2 * ndim)).collect();
    Boxes { ndim, words: boxes }.search(ndim - 1, &all, &all)
}

/// A hit of the search.
type Pair = Option<(usize, usize)>;

struct Boxes<'a> {
    ndim: usize,
    words: &'a [u64],
}

impl Boxes<'_> {
    fn begin(&self, place: usize, axis: usize) -> u64 {
        self.words[2 * self.ndim * place + axis]
    }

    fn end(&self, place: usize, axis: usize) -> u64 {
        self.begin(place, axis) + self.words[2 * self.ndim * place + self.ndim + axis]
    }

    /// An overlap of an interval with a point that begins inside it along `axis`; along the dimensions
    /// after `axis` all given intervals overlap all given points.
    fn search(&self, axis: usize, intervals: &[usize], points: &[usize]) -> Pair {
        if intervals.len().min(points.len()) <= FEW {
            return self.compare_all(intervals, points);
        }
        if axis == 0 {
            return self.sweep(intervals, points);
        }
        let begins = || points.iter().map(|&point| self.begin(point, axis));
        let (low, high) = (begins().min()?, begins().max()?);
        let meets = |&place: &usize| self.begin(place, axis) <= high && self.end(place, axis) > low;
        let holds_all = |&place: &usize| self.begin(place, axis) <= low && self.end(place, axis) > high;
        let (across, rest): (Vec<usize>, Vec<usize>) =
            intervals.iter().copied().filter(meets).partition(holds_all);
        let decided = self.search(axis - 1, &across, points);
        let decided = decided.or_else(|| self.search(axis - 1, points, &across));
        if decided.is_some() || rest.is_empty() {
            return decided;
        }
        // Some interval holds not all points, so they begin at more than one place.
        let middle = self.median(axis, points, low);
        let (left, right): (Vec<usize>, Vec<usize>) =
            points.iter().copied().partition(|&point| self.begin(point, axis) < middle);
        let below: Vec<usize> = rest.iter().copied().filter(|&one| self.begin(one, axis) < middle).collect();
        let above: Vec<usize> = rest.iter().copied().filter(|&one| self.end(one, axis) > middle).collect();
        self.search(axis, &below, &left).or_else(|| self.search(axis, &above, &right))
    }

    /// A place that leaves points on both sides, about as many if they begin at different places.
    fn median(&self, axis: usize, points: &[usize], low: u64) -> u64 {
        let mut begins: Vec<u64> = points.iter().map(|&point| self.begin(point, axis)).collect();
        let middle = begins.len() / 2;
        let found = *begins.select_nth_unstable(middle).1;
        if found > low {
            return found;
        }
        begins.into_iter().filter(|&begin| begin > low).min().unwrap_or(found)
    }

    fn compare_all(&self, intervals: &[usize], points: &[usize]) -> Pair {
        let overlap = |first: usize, second: usize| {
            (0..self.ndim).all(|axis| {
                self.begin(first, axis) < self.end(second, axis)
                    && self.begin(second, axis) < self.end(first, axis)
            })
        };
        intervals.iter().find_map(|&first| {
            let hit = |&&second: &&usize| first != second && overlap(first, second);
            points.iter().find(hit).map(|&second| (first, second))
        })
    }

    /// Along the last dimension to look at: the interval that reaches farthest of those that begin before
    /// a point holds it, if any does. Two are kept, because one may be the point's own box.
    fn sweep(&self, intervals: &[usize], points: &[usize]) -> Pair {
        let sorted = |places: &[usize]| {
            let mut places = places.to_vec();
            places.sort_unstable_by_key(|&place| self.begin(place, 0));
            places
        };
        let (intervals, points) = (sorted(intervals), sorted(points));
        let mut next = intervals.into_iter().peekable();
        let mut farthest: [Option<usize>; 2] = [None, None];
        for point in points {
            let at = self.begin(point, 0);
            while let Some(interval) = next.next_if(|&interval| self.begin(interval, 0) <= at) {
                let reach = |place: Option<usize>| place.map_or(0, |place| self.end(place, 0));
                if self.end(interval, 0) > reach(farthest[0]) {
                    farthest = [Some(interval), farthest[0]];
                } else if self.end(interval, 0) > reach(farthest[1]) {
                    farthest[1] = Some(interval);
                }
            }
            let other = farthest.into_iter().flatten().find(|&interval| interval != point);
            if let Some(interval) = other.filter(|&interval| self.end(interval, 0) > at) {
                return Some((interval, point));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Boxes of `count` along each dimension, one beside the other.
    fn bricks(ndim: usize, count: u64) -> Vec<u64> {
        let mut places = vec![vec![]];
        for _ in 0..ndim {
            places = places
                .iter()
                .flat_map(|place: &Vec<u64>| (0..count).map(move |at| [&place[..], &[3 * at]].concat()))
                .collect();
        }
        places.iter().flat_map(|place| [&place[..], &vec![3; ndim][..]].concat()).collect()
    }

    #[test]
    fn bricks_do_not_overlap_until_one_grows() {
        for (ndim, count) in [(1, 1000), (2, 40), (3, 12), (5, 4)] {
            let boxes = bricks(ndim, count);
            assert_eq!(find_overlap(ndim, &boxes), None);
            let number = boxes.len() / (2 * ndim);
            for grown in [0, number / 3] {
                for axis in 0..ndim {
                    let mut boxes = boxes.clone();
                    boxes[2 * ndim * grown + ndim + axis] += 1;
                    let (first, second) = find_overlap(ndim, &boxes).unwrap_or_default();
                    assert!(first != second && (first == grown || second == grown), "{ndim} {axis}");
                }
            }
        }
    }

    #[test]
    fn bars_along_every_dimension_cross_between_each_other() {
        // Along every axis a third of them span all the others: no sweep along one axis is short.
        let size = 40u64;
        let mut boxes: Vec<u64> = vec![];
        for (row, column) in (0..size).flat_map(|row| (0..size).map(move |column| (3 * row, 3 * column))) {
            boxes.extend([0, row, column, 3 * size, 1, 1]);
            boxes.extend([row, 0, column + 1, 1, 3 * size, 1]);
            boxes.extend([row + 1, column + 1, 0, 1, 1, 3 * size]);
        }
        // Bars of two directions differ modulo 3 where they could meet.
        assert_eq!(find_overlap(3, &boxes), None);
        let last = boxes.len() - 6;
        boxes[last] -= 1;
        assert!(find_overlap(3, &boxes).is_some());
    }

    #[test]
    fn the_same_box_twice() {
        assert_eq!(find_overlap(0, &[]), None);
        assert!(find_overlap(1, &[4, 1, 4, 1]).is_some());
        let many: Vec<u64> = [7, 9, 2, 3].repeat(50);
        assert!(find_overlap(2, &many).is_some());
    }
}
