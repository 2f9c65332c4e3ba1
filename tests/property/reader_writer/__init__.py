"""A model of the reader/writer rule (invariant I2), small enough that every interleaving is visited.

One writer, one reader, one client that maps and calls, operators, time and the process act on one State. Each of their
atomic steps is a transition, so whoever does not step is paused. The table of slots is the product's own Layout.

    reader   sent ─▶ marked ─▶ checked ─▶ launched ─▶ read ─▶ read ─▶ checked again, delivered or discarded, unmarked
    writer   publishes filling ─▶ sees no mark ─▶ writes parts ─▶ begins to write ─▶ ends ─▶ publishes occupied

What a kernel reads is one step for each read, after its launch has returned. A reader in the client's process
(Plane.DIRECT) has no mark: it checks the words of the memory that it has mapped, which stays as it was when its
process dies. The ranks and scales of a mapping, its parts, it reads once, before its first call:

             sent ─▶ parts read ─▶ parts checked and kept ─▶ checked ─▶ launched ─▶ …

The first check of a unit reads words alone, every other asks the socket too. A check is one step: whatever order its
words are read in, each is read after the last read of the slot. So is a word, which is written whole;
`writes_word_whole` says what happens where it is not.

Steps are sequentially consistent, as I2 demands. What a store buffer would do is what `marks_first` and
`publishes_before_waiting` exclude, what a missing load fence would do is what `checks_again_after_completion` excludes.
An idle mapping that loses its pins stands for an ended session in the sidecar too: after that a client may do less,
nothing more. A direct client's session ends in two steps: the word of its region, then its socket.
"""
