"""Words for keys and lists: a short list of our own, made-up words where it ends, or a file's."""

import dataclasses
import functools
import random

from certjax.eval.tasks.ruler.templates import digest, read_table

_ADJECTIVES = """
able ample amber ancient bitter blank bold brave brief bright brisk broad broken busy calm careful cheap cheerful civil
clean clear clever cloudy coarse cold common cosy crisp crooked curious daily damp dark dear deep dense distant double
dry dull eager early easy empty equal fair faint famous fancy fast fierce final firm flat fond fragile free fresh
frosty full gentle giant glad golden grand grave great hollow honest humble hungry idle jolly keen kind large late
lazy lean light little lively lonely long loose loud loyal lucky mellow merry mild modest narrow neat nimble noble
odd old open pale patient plain polite proud pure quick quiet rapid rare ready rich ripe rough round royal rusty
sandy secret sharp shiny short shy silent silver simple sleepy slim slow small smart smooth snowy sober soft solid
sour spare stable steady steep stern stiff still stout strange strict strong sturdy subtle sudden sunny sweet swift
tall tame tender thick thin tidy tiny tired tough true urgent vague vast warm wary wet wide wild wise wooden young
"""
_NOUNS = """
acorn anchor apple apron arrow attic autumn badge baker balcony banner barrel basin basket beacon beaver bench berry
bishop blanket blossom boulder branch bridge bucket button cabin camel candle canoe canvas carpet castle cave cellar
chapel cherry chimney circus citizen clock cloud coast cobbler coffee collar comet compass copper coral cottage cradle
crane cricket crown curtain dagger dairy dancer desert diamond dinner doctor dolphin donkey dragon drawer drum eagle
engine falcon farmer feather fence ferry fiddle field finger flame flute forest fossil fountain garden garlic ginger
glacier glove goose grape guitar hammer harbour harvest hedge helmet heron hill horse hotel iceberg insect island
jacket jewel judge jungle kettle kitchen kitten ladder lagoon lantern lemon letter library lizard locket lobster
magnet maple marble market meadow melon mirror monkey mountain museum napkin needle nephew nurse oak ocean olive onion
orchard otter oven oyster palace panther paper parrot pasture pebble pencil pepper piano pigeon pillow pilot planet
plum pocket poet pond potter prairie prince pumpkin puppet quarry queen quilt rabbit raven reef ribbon river robin
rocket saddle sailor salmon scarf school shadow shepherd shovel singer sister spider spoon square stable station
statue stream summer swan sword tailor temple thistle thunder ticket tiger tower trumpet tunnel turtle uncle valley
velvet village violin wagon walnut water whistle willow window winter wizard wolf yard zebra
"""
_VERBS = """
accept admire agree arrive bake bathe begin believe blame borrow bounce build carry chase choose climb collect cook
count cross dance decide deliver deny describe dig dream drift earn enjoy enter escape explain fetch fold follow forget
gather greet grow guard guess hasten hide hope hurry imagine invite join jump knock laugh lead learn lend listen lower
measure mend mention mix notice obey offer order paint pause plant pour praise prefer prevent promise pull push reach
refuse remain repair rescue reply scatter search settle shake share shout sing skip smile sneeze stretch study swim
teach tease thank throw tremble trust vanish visit wait wander wash weave welcome whisper wonder write yawn
"""
_MADE_UP = 40_000


@dataclasses.dataclass(frozen=True)
class Words:
    """Where words come from.

    Attributes:
      nouns: for keys and lists.
      adjectives: for keys and lists.
      verbs: for lists.
      name: what results call them.
      sha256: 16 hexadecimal digits of all of them.
    """

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]
    name: str
    sha256: str

    @functools.cached_property
    def pairs(self) -> list[str]:
        """Keys: every adjective with every noun, sorted."""
        return sorted({f"{adjective}-{noun}" for adjective in self.adjectives for noun in self.nouns})

    @functools.cached_property
    def single(self) -> list[str]:
        """Every word, sorted."""
        return sorted({*self.nouns, *self.adjectives, *self.verbs})

    @functools.cached_property
    def more(self) -> list[str]:
        """Every word, and made-up ones for lists that need more."""
        return [*self.single, *sorted(set(made_up(_MADE_UP)) - set(self.single))]


def load(path: str | None) -> Words:
    """Words of a JSON or TOML file with the lists `nouns`, `adjectives` and `verbs`; ours for None.

    Ours has 503 English words and 38 106 pairs, then made-up words; published results use lists of thousands (package
    wonderwords), whose longer and rarer words take more tokens.

    Raises:
      ValueError: a file that cannot be read, or a list that is missing, empty or holds anything but words.
    """
    if path is None:
        lists = {"nouns": _NOUNS.split(), "adjectives": _ADJECTIVES.split(), "verbs": _VERBS.split()}
        name = "own words 1"
    else:
        lists, name = read_table(path), path
        if lists.keys() != {"nouns", "adjectives", "verbs"}:
            raise ValueError(f"{path}: must hold the lists nouns, adjectives and verbs, got {sorted(lists)}")
        for key, words in lists.items():
            if not isinstance(words, list) or not words or not all(isinstance(w, str) and w.strip() for w in words):
                raise ValueError(f"{path}: {key} must be a list of words, got {str(words)[:60]}")
    nouns, adjectives, verbs = (tuple(lists[key]) for key in ("nouns", "adjectives", "verbs"))
    return Words(nouns, adjectives, verbs, name, digest(lists))


@functools.cache
def made_up(count: int) -> list[str]:
    """Different pronounceable words of two syllables, always the same ones."""
    onsets = [*"bcdfghklmnprstvwyz", *(first + "l" for first in "bcfps"), *(first + "r" for first in "bcdfgpt")]
    syllables = [onset + vowel + coda for onset in onsets for vowel in "aeiou" for coda in ("", *"lmnrstx")]
    rng = random.Random(1)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(syllables, k=2))] = None
    return list(words)
