#include "index.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

namespace pystale {
namespace {

using Member = StalenessIndex::Member;
using Thresholds = StalenessIndex::Thresholds;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::uint32_t kLastGeneration = 0x7fffffff;

// 1 + step + threshold for step >= 0, threshold >= 1; nothing where it does not fit, since no T reaches it.
std::optional<std::int64_t> deadline_after(std::int64_t step, std::int64_t threshold) noexcept {
    if (threshold > kMax - 1 - step) return std::nullopt;  // kMax - 1 - step >= -1 does not overflow
    return 1 + step + threshold;
}

std::optional<std::int64_t> earlier(std::optional<std::int64_t> a, std::optional<std::int64_t> b) noexcept {
    if (!a) return b;
    if (!b) return a;
    return std::min(*a, *b);
}

std::optional<std::int64_t> deadline_of(const Member& member, const Thresholds& thresholds) noexcept {
    std::optional<std::int64_t> deadline;
    if (member.oldest >= 0) deadline = deadline_after(member.oldest, thresholds.stale);
    if (member.newest_trainable >= 0 && thresholds.token)
        deadline = earlier(deadline, deadline_after(member.newest_trainable, *thresholds.token));
    return deadline;
}

std::optional<std::int64_t> deadline_of(std::span<const Member> members, const Thresholds& thresholds) noexcept {
    std::optional<std::int64_t> deadline;
    for (const Member& member : members) deadline = earlier(deadline, deadline_of(member, thresholds));
    return deadline;
}

void require_thresholds(const Thresholds& thresholds) {
    if (thresholds.stale < 1)
        throw std::invalid_argument("stale_threshold is " + std::to_string(thresholds.stale) +
                                    "; at least 1 trainer step is required");
    if (thresholds.token && *thresholds.token < 1)
        throw std::invalid_argument("token_stale_threshold is " + std::to_string(*thresholds.token) +
                                    "; at least 1 trainer step is required, or None to turn the token rule off");
}

void require_status(std::int64_t status) {
    if (status < 0 || status >= StalenessIndex::kStatuses)
        throw std::invalid_argument("status is " + std::to_string(status) + "; 0 to " +
                                    std::to_string(StalenessIndex::kStatuses - 1) + " are allowed");
}

}  // namespace

// --- tasks -----------------------------------------------------------------------------------------------------------

std::int64_t StalenessIndex::add_task(const Thresholds& thresholds) {
    require_thresholds(thresholds);
    auto task = std::make_unique<Task>();
    task->thresholds = thresholds;
    tasks_.push_back(std::move(task));
    return static_cast<std::int64_t>(tasks_.size()) - 1;
}

void StalenessIndex::set_thresholds(std::int64_t task, const Thresholds& thresholds) {
    (void)task_at(task);
    require_thresholds(thresholds);
    Task& changed = *tasks_[static_cast<std::size_t>(task)];
    if (changed.thresholds == thresholds) return;

    const auto new_deadline = [&](Slot slot) { return deadline_of(members_of(at(slot)), thresholds); };
    // First every bucket is made, aside, so that running out of memory leaves the old deadlines in place.
    std::array<DueMap, kStatuses> due;
    for (std::size_t status = 0; status < due.size(); ++status)
        for (const auto& [key, bucket] : changed.pools[status].order)
            visit_in_order(bucket, [&](Slot slot) {
                if (const auto deadline = new_deadline(slot)) due[status].try_emplace(*deadline);
                return true;
            });
    // From here on nothing allocates.
    changed.thresholds = thresholds;
    for (std::size_t status = 0; status < due.size(); ++status) {
        Pool& pool = changed.pools[status];
        pool.due.swap(due[status]);
        for (const auto& [key, bucket] : pool.order)
            visit_in_order(bucket, [&](Slot slot) {
                const auto deadline = new_deadline(slot);
                attach_due(slot, deadline ? std::optional(pool.due.find(*deadline)) : std::nullopt);
                return true;
            });
    }
}

// --- groups come, move and go ----------------------------------------------------------------------------------------

StalenessIndex::GroupId StalenessIndex::insert(std::int64_t task, std::int64_t status, std::optional<std::int64_t> key,
                                               std::int64_t arrival, std::span<const std::int64_t> oldest,
                                               std::span<const std::int64_t> newest_trainable) {
    (void)pool_at(task, status);
    if (oldest.size() != newest_trainable.size())
        throw std::invalid_argument("oldest has " + std::to_string(oldest.size()) + " entries, newest_trainable has " +
                                    std::to_string(newest_trainable.size()) +
                                    "; one entry per member is required in both");
    if (oldest.empty()) throw std::invalid_argument("oldest has no entries; a group has at least one member");
    if (oldest.size() >= kNoSlot)
        throw std::invalid_argument("oldest has " + std::to_string(oldest.size()) + " entries; too many for one group");

    auto members = std::make_unique_for_overwrite<Member[]>(oldest.size());
    for (std::size_t i = 0; i < oldest.size(); ++i)
        members[i] = {std::max(oldest[i], kNone), std::max(newest_trainable[i], kNone)};

    Slot slot = free_;
    if (slot == kNoSlot) {
        if (used_ == kNoSlot) throw std::length_error("the index is full: every group id has been issued");
        if (used_ / kChunk == chunks_.size()) chunks_.push_back(std::make_unique<Group[]>(kChunk));
        slot = used_;
    }
    Task& owner = *tasks_[static_cast<std::size_t>(task)];
    const auto deadline = deadline_of({members.get(), oldest.size()}, owner.thresholds);
    const Place place = reserve(owner.pools[static_cast<std::size_t>(status)], slot, OrderKey(!key, key.value_or(0)),
                                arrival, deadline);

    // From here on nothing allocates.
    Group& group = at(slot);
    if (slot == free_)
        free_ = group.due_link.next;
    else
        ++used_;
    group.members = std::move(members);
    group.arrival = arrival;
    group.member_count = static_cast<Slot>(oldest.size());
    group.task = static_cast<std::uint32_t>(task);
    group.status = static_cast<std::uint8_t>(status);
    attach(slot, place);
    ++size_;
    member_bytes_ += oldest.size() * sizeof(Member);
    return id_of(slot);
}

void StalenessIndex::expire(GroupId id, std::span<const std::int64_t> positions, std::int64_t status) {
    const Slot slot = slot_of(id);
    Group& group = at(slot);
    require_status(status);
    for (std::size_t i = 0; i < positions.size(); ++i)
        if (positions[i] < 0 || positions[i] >= static_cast<std::int64_t>(group.member_count))
            throw std::out_of_range("members[" + std::to_string(i) + "] is " + std::to_string(positions[i]) +
                                    "; group " + std::to_string(id) + " has members 0 to " +
                                    std::to_string(group.member_count - 1));

    auto members = std::make_unique_for_overwrite<Member[]>(group.member_count);
    std::ranges::copy(members_of(group), members.get());
    for (const std::int64_t position : positions) members[static_cast<std::size_t>(position)] = {kNone, kNone};

    Task& task = *tasks_[group.task];
    Pool& target = task.pools[static_cast<std::size_t>(status)];
    const auto deadline = deadline_of({members.get(), group.member_count}, task.thresholds);
    if (static_cast<std::uint8_t>(status) != group.status) {
        const Place place = reserve(target, slot, group.order->first, group.arrival, deadline);
        detach(slot);
        group.status = static_cast<std::uint8_t>(status);
        attach(slot, place);
    } else if (deadline != (group.has_deadline ? std::optional(group.due->first) : std::nullopt)) {
        std::optional<DueMap::iterator> due;
        if (deadline) due = target.due.try_emplace(*deadline).first;
        detach_due(slot);
        attach_due(slot, due);
    }
    group.members = std::move(members);
}

void StalenessIndex::remove(GroupId id) {
    const Slot slot = slot_of(id);
    Group& group = at(slot);
    detach(slot);
    member_bytes_ -= group.member_count * sizeof(Member);
    group.members.reset();
    --size_;
    if (group.generation == kLastGeneration) return;  // retired: using it again would issue its first id again
    ++group.generation;
    group.due_link.next = free_;
    free_ = slot;
}

// --- questions -------------------------------------------------------------------------------------------------------

std::vector<StalenessIndex::GroupId> StalenessIndex::due(std::int64_t train_step, std::int64_t statuses,
                                                         std::optional<std::int64_t> task) const {
    if (statuses < 0 || statuses >= (std::int64_t{1} << kStatuses))
        throw std::invalid_argument("statuses is " + std::to_string(statuses) + "; a bitmask of 1 << status, 0 to " +
                                    std::to_string((1 << kStatuses) - 1) + ", is required");
    std::size_t from = 0, to = tasks_.size();
    if (task) {
        (void)task_at(*task);
        from = static_cast<std::size_t>(*task);
        to = from + 1;
    }
    std::vector<std::tuple<std::int64_t, std::size_t, GroupId>> found;  // (arrival, task, group)
    for (std::size_t number = from; number < to; ++number)
        for (std::size_t status = 0; status < kStatuses; ++status) {
            if (!(statuses >> status & 1)) continue;
            for (const auto& [deadline, groups] : tasks_[number]->pools[status].due) {
                if (deadline > train_step) break;
                for (Slot slot = groups.head; slot != kNoSlot; slot = at(slot).due_link.next)
                    found.emplace_back(at(slot).arrival, number, id_of(slot));
            }
        }
    std::ranges::sort(found);
    std::vector<GroupId> ids;
    ids.reserve(found.size());
    for (const auto& entry : found) ids.push_back(std::get<2>(entry));
    return ids;
}

void StalenessIndex::due_members(GroupId id, std::int64_t train_step, std::vector<std::int64_t>& positions) const {
    const Group& group = group_of(id);
    const Thresholds& thresholds = tasks_[group.task]->thresholds;
    positions.clear();
    std::int64_t position = 0;
    for (const Member& member : members_of(group)) {
        const auto deadline = deadline_of(member, thresholds);
        if (deadline && *deadline <= train_step) positions.push_back(position);
        ++position;
    }
}

std::vector<StalenessIndex::GroupId> StalenessIndex::first(std::int64_t task, std::int64_t status,
                                                           std::int64_t n) const {
    const Pool& pool = pool_at(task, status);
    if (n < 0) throw std::invalid_argument("n is " + std::to_string(n) + "; at least 0 is required");
    const auto wanted = static_cast<std::size_t>(std::min(n, pool.count));
    std::vector<GroupId> ids;
    ids.reserve(wanted);
    for (const auto& [key, bucket] : pool.order) {
        const bool more = visit_in_order(bucket, [&](Slot slot) {
            if (ids.size() == wanted) return false;
            ids.push_back(id_of(slot));
            return true;
        });
        if (!more) break;
    }
    return ids;
}

std::int64_t StalenessIndex::count(std::int64_t task, std::int64_t status) const { return pool_at(task, status).count; }

std::int64_t StalenessIndex::count_keys(std::int64_t task, std::int64_t status, std::int64_t first,
                                        std::int64_t last) const {
    const OrderMap& order = pool_at(task, status).order;
    std::int64_t count = 0;
    for (auto at = order.lower_bound({false, first}); at != order.end() && at->first <= OrderKey{false, last}; ++at)
        count += at->second.in_order.count + static_cast<std::int64_t>(at->second.late.size());
    return count;
}

std::int64_t StalenessIndex::seq_staleness(const Member& member, std::int64_t train_step) noexcept {
    if (member.oldest < 0) return 0;
    if (train_step < kMin + 1 + member.oldest) return kMin;
    return train_step - member.oldest - 1;
}

std::span<const StalenessIndex::Member> StalenessIndex::members(GroupId group) const {
    return members_of(group_of(group));
}

std::optional<std::int64_t> StalenessIndex::key(GroupId group) const {
    const auto [none, key] = group_of(group).order->first;
    return none ? std::nullopt : std::optional(key);
}

std::int64_t StalenessIndex::arrival(GroupId group) const { return group_of(group).arrival; }

std::int64_t StalenessIndex::status(GroupId group) const { return group_of(group).status; }

std::optional<std::int64_t> StalenessIndex::deadline(GroupId id) const {
    const Group& group = group_of(id);
    return group.has_deadline ? std::optional(group.due->first) : std::nullopt;
}

bool StalenessIndex::contains(GroupId group) const noexcept {
    if (group < 0) return false;
    const auto slot = static_cast<Slot>(group & kNoSlot);
    return slot < used_ && at(slot).members && id_of(slot) == group;
}

std::int64_t StalenessIndex::size() const noexcept { return size_; }

std::size_t StalenessIndex::nbytes() const noexcept {
    constexpr std::size_t node = 4 * sizeof(void*);   // what a map or set adds to an entry
    constexpr std::size_t block = 2 * sizeof(void*);  // what the allocator adds to a block, about
    std::size_t bytes = sizeof(*this) + chunks_.size() * (kChunk * sizeof(Group) + block) + member_bytes_ +
                        static_cast<std::size_t>(size_) * block + tasks_.size() * (sizeof(Task) + block);
    for (const auto& task : tasks_)
        for (const Pool& pool : task->pools) {
            bytes += pool.due.size() * (node + sizeof(DueMap::value_type) + block);
            bytes += pool.order.size() * (node + sizeof(OrderMap::value_type) + block);
            for (const auto& [key, bucket] : pool.order)
                bytes += bucket.late.size() * (node + sizeof(decltype(bucket.late)::value_type) + block);
        }
    return bytes;
}

// --- inside ----------------------------------------------------------------------------------------------------------

StalenessIndex::GroupId StalenessIndex::id_of(Slot slot) const noexcept {
    return static_cast<GroupId>(at(slot).generation) << 32 | static_cast<GroupId>(slot);
}

StalenessIndex::Slot StalenessIndex::slot_of(GroupId group) const {
    if (!contains(group))
        throw UnknownGroup("group " + std::to_string(group) +
                           " is not in the index: never inserted, or taken or removed");
    return static_cast<Slot>(group & kNoSlot);
}

const StalenessIndex::Task& StalenessIndex::task_at(std::int64_t task) const {
    if (task < 0 || task >= static_cast<std::int64_t>(tasks_.size()))
        throw std::out_of_range("task is " + std::to_string(task) + "; the index has " + std::to_string(tasks_.size()) +
                                " tasks, numbered from 0");
    return *tasks_[static_cast<std::size_t>(task)];
}

const StalenessIndex::Pool& StalenessIndex::pool_at(std::int64_t task, std::int64_t status) const {
    const Task& owner = task_at(task);
    require_status(status);
    return owner.pools[static_cast<std::size_t>(status)];
}

std::span<StalenessIndex::Member> StalenessIndex::members_of(const Group& group) const noexcept {
    return {group.members.get(), group.member_count};
}

// All that linking a group may allocate happens here, and is undone when a later part of it fails. The slot is not
// touched, so a group may still be linked elsewhere, but not in this pool.
StalenessIndex::Place StalenessIndex::reserve(Pool& pool, Slot slot, OrderKey key, std::int64_t arrival,
                                              std::optional<std::int64_t> deadline) {
    Place place{.order = pool.order.try_emplace(key).first, .due = std::nullopt, .late = false};
    OrderBucket& bucket = place.order->second;
    const Slot tail = bucket.in_order.tail;
    try {
        if (tail != kNoSlot && arrival < at(tail).arrival) place.late = bucket.late.emplace(arrival, slot).second;
        if (deadline) place.due = pool.due.try_emplace(*deadline).first;
    } catch (...) {
        if (place.late) bucket.late.erase({arrival, slot});
        if (bucket.empty()) pool.order.erase(place.order);
        throw;
    }
    return place;
}

void StalenessIndex::attach(Slot slot, const Place& place) noexcept {
    Group& group = at(slot);
    group.order = place.order;
    group.late = place.late;
    if (!place.late) append<&Group::order_link>(place.order->second.in_order, slot);
    ++pool_of(group).count;
    attach_due(slot, place.due);
}

void StalenessIndex::detach(Slot slot) noexcept {
    Group& group = at(slot);
    detach_due(slot);
    OrderBucket& bucket = group.order->second;
    if (group.late)
        bucket.late.erase({group.arrival, slot});
    else
        unlink<&Group::order_link>(bucket.in_order, slot);
    Pool& pool = pool_of(group);
    if (bucket.empty()) pool.order.erase(group.order);
    --pool.count;
}

void StalenessIndex::attach_due(Slot slot, std::optional<DueMap::iterator> due) noexcept {
    Group& group = at(slot);
    group.has_deadline = due.has_value();
    if (!due) return;
    group.due = *due;
    append<&Group::due_link>(group.due->second, slot);
}

void StalenessIndex::detach_due(Slot slot) noexcept {
    Group& group = at(slot);
    if (!group.has_deadline) return;
    List& groups = group.due->second;
    unlink<&Group::due_link>(groups, slot);
    if (groups.head == kNoSlot) pool_of(group).due.erase(group.due);
}

template <StalenessIndex::Link StalenessIndex::Group::* link>
void StalenessIndex::append(List& list, Slot slot) noexcept {
    at(slot).*link = {list.tail, kNoSlot};
    (list.tail == kNoSlot ? list.head : (at(list.tail).*link).next) = slot;
    list.tail = slot;
    ++list.count;
}

template <StalenessIndex::Link StalenessIndex::Group::* link>
void StalenessIndex::unlink(List& list, Slot slot) noexcept {
    const auto [prev, next] = at(slot).*link;
    (prev == kNoSlot ? list.head : (at(prev).*link).next) = next;
    (next == kNoSlot ? list.tail : (at(next).*link).prev) = prev;
    --list.count;
}

template <typename Visit>
bool StalenessIndex::visit_in_order(const OrderBucket& bucket, Visit&& visit) const {
    Slot next = bucket.in_order.head;
    auto late = bucket.late.begin();
    while (next != kNoSlot || late != bucket.late.end()) {
        Slot slot = next;
        if (next == kNoSlot || (late != bucket.late.end() && late->first < at(next).arrival))
            slot = (late++)->second;
        else
            next = at(next).order_link.next;
        if (!visit(slot)) return false;
    }
    return true;
}

}  // namespace pystale
