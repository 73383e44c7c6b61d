"""The loops of selective matching: scores and tentative matches of candidates, one after the other.

Codes are (N, L) uint64 here. `selective_matching.py` checks the arrays and says what they mean.
"""

from __future__ import annotations

import numpy as np

from ckn_scale.core.compiled import compile_loop, count_bits


@compile_loop
def score_images(
    query_codes: np.ndarray,
    position: np.ndarray,
    words: np.ndarray,
    codes: np.ndarray,
    offsets: np.ndarray,
    weights: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Σ weights[distance] over the words an image shares with the query (C,), and its number of words (C,).

    `position` (65536,) is the query's code of a word, or −1. Points are sorted by word within an image, else
    its number of words is −1.
    """
    num_images, width = len(offsets) - 1, codes.shape[1]
    totals, num_words = np.zeros(num_images), np.zeros(num_images, np.int64)
    voted = np.empty(width, np.uint64)
    for image in range(num_images):
        start, end = offsets[image], offsets[image + 1]
        while start < end:
            word, stop = words[start], start + 1
            while stop < end and words[stop] == word:
                stop += 1
            if stop < end and words[stop] < word:
                num_words[image] = -1
                break
            num_words[image] += 1
            partner = position[word]
            if partner >= 0:
                _vote(codes, start, stop, voted)
                distance = 0
                for part in range(width):
                    distance += np.int64(count_bits(query_codes[partner, part] ^ voted[part]))
                totals[image] += weights[distance]
            start = stop
    return totals, num_words


@compile_loop
def vote_codes(codes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(G, L): of each group of codes, from one start to the next, the majority of each bit."""
    voted = np.empty((len(starts), codes.shape[1]), np.uint64)
    for group in range(len(starts)):
        stop = starts[group + 1] if group + 1 < len(starts) else len(codes)
        _vote(codes, starts[group], stop, voted[group])
    return voted


@compile_loop
def _vote(codes: np.ndarray, start: int, stop: int, voted: np.ndarray) -> None:
    """The majority of each bit of codes[start:stop]; where both are as frequent, the first code's."""
    count = stop - start
    for part in range(codes.shape[1]):
        first = codes[start, part]
        if count <= 2:
            voted[part] = first
        elif count == 3:
            second, third = codes[start + 1, part], codes[start + 2, part]
            voted[part] = (first & second) | (third & (first | second))
        else:
            more, equal = _compare_ones(codes[start:stop, part], count // 2)
            voted[part] = more | (equal & first) if count % 2 == 0 else more


@compile_loop
def _compare_ones(column: np.ndarray, number: int) -> tuple[int, int]:
    """The bits that are set in more than `number` of the words, and those that are set in exactly as many.

    The ones of all 64 bits are counted at once: plane k holds digit k of each count.
    """
    planes = np.zeros(32, np.uint64)
    used = 0
    for carry in column:
        place = 0
        while carry != 0:
            planes[place], carry = planes[place] ^ carry, planes[place] & carry
            place += 1
        used = max(used, place)
    while number >> used:
        used += 1
    more, equal = np.uint64(0), ~np.uint64(0)
    for place in range(used - 1, -1, -1):
        if (number >> place) & 1:
            equal &= planes[place]
        else:
            more |= equal & planes[place]
            equal &= ~planes[place]
    return more, equal


@compile_loop
def match_images(
    starts: np.ndarray,
    query_of: np.ndarray,
    query_codes: np.ndarray,
    num_query: int,
    words: np.ndarray,
    codes: np.ndarray,
    offsets: np.ndarray,
    max_distance: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mutual nearest pairs of a query's points and each image's: query, point, distance, and new offsets.

    Rows of `query_of` and `query_codes` are the query's assignments by word, those of word w from starts[w]
    to starts[w + 1]; by its points where words are equal.
    """
    num_images, width = len(offsets) - 1, codes.shape[1]
    query, point = np.empty(len(words), np.int64), np.empty(len(words), np.int64)
    distances, found = np.empty(len(words), np.int64), np.zeros(num_images + 1, np.int64)
    nearest_point, least = np.empty(num_query, np.int64), np.empty(num_query, np.int64)
    nearest_query = np.empty(len(words), np.int64)
    count = 0
    for image in range(num_images):
        least[:] = max_distance + 1
        for row in range(offsets[image], offsets[image + 1]):
            best, nearest = max_distance + 1, np.int64(-1)
            for assignment in range(starts[words[row]], starts[words[row] + 1]):
                distance = 0
                for part in range(width):
                    distance += np.int64(count_bits(query_codes[assignment, part] ^ codes[row, part]))
                if distance > max_distance:
                    continue
                asked = query_of[assignment]
                if distance < best or (distance == best and asked < nearest):
                    best, nearest = distance, asked
                if distance < least[asked]:
                    least[asked], nearest_point[asked] = distance, row
            nearest_query[row] = nearest
        for asked in range(num_query):
            if least[asked] <= max_distance and nearest_query[nearest_point[asked]] == asked:
                query[count], point[count] = asked, nearest_point[asked]
                distances[count] = least[asked]
                count += 1
        found[image + 1] = count
    return query[:count], point[:count], distances[:count], found
