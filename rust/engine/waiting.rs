//! Who waits, in the order in which they are let in. However many they are, a step does not pay for them:
//! all that is done to one of n costs log n.

use super::running::Running;
use std::collections::{BTreeMap, HashMap};

/// The preempted first, then by priority and age.
type Place = (bool, i32, u64);

#[derive(Default)]
pub struct Waiting {
    line: BTreeMap<Place, Running>,
    places: HashMap<u64, Place>,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.line.len()
    }

    pub fn push(&mut self, sequence: Running) {
        let (priority, id) = sequence.rank();
        let place = (sequence.preempted == 0, priority, id);
        self.places.insert(id, place);
        self.line.insert(place, sequence);
    }

    /// In their order.
    pub fn iter(&self) -> impl Iterator<Item = &Running> {
        self.line.values()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Running> {
        self.line.values_mut()
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut Running> {
        self.line.get_mut(self.places.get(&id)?)
    }

    pub fn remove(&mut self, id: u64) -> Option<Running> {
        self.line.remove(&self.places.remove(&id)?)
    }
}
