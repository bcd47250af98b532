"""The text the built-in demo model is trained on: a hand-written grammar of small stories and chat turns.

Every sentence in this file was written for tinyvllm, so the model that is trained on it can be shipped with the
program. `document(rng)` returns one training document; the same seed always returns the same document.

Templates use a tiny notation, so that one line stands for many sentences:

    [a|b|c]   one of the alternatives (they nest; an alternative may be empty)
    {key}     a value of the story at hand (`{Key}` is the same with a capital letter)
    <pool>    a template drawn from `POOLS`

Alternatives are not drawn evenly: earlier ones are more likely (`skewed`). A uniform grammar would leave a trained
model with ties at every choice, and its greedy output would then depend on the last bit of the arithmetic.
"""

import re

# --------------------------------------------------------------------------------------------------------------
# The template notation
# --------------------------------------------------------------------------------------------------------------

_compiled = {}


def skewed(rng, n):
    """An index below n; index 0 is about 1.7 times as likely as index 1, whatever n is."""
    return int(n * rng.random() ** 1.5)


def pick(rng, options):
    return options[skewed(rng, len(options))]


def _parse(text, pos, closers):
    """Parses a sequence of nodes up to one of `closers`; returns (nodes, position of the closer)."""
    nodes, literal = [], []
    while pos < len(text) and text[pos] not in closers:
        ch = text[pos]
        if ch == "[":
            alternatives = []
            while text[pos] != "]":
                nodes_alt, pos = _parse(text, pos + 1, "|]")
                alternatives.append(nodes_alt)
            node = ("alt", alternatives)
        elif ch == "{":
            end = text.index("}", pos)
            node, pos = ("var", text[pos + 1 : end]), end
        elif ch == "<":
            end = text.index(">", pos)
            node, pos = ("pool", text[pos + 1 : end]), end
        else:
            literal.append(ch)
            pos += 1
            continue
        if literal:
            nodes.append("".join(literal))
            literal = []
        nodes.append(node)
        pos += 1
    if literal:
        nodes.append("".join(literal))
    return nodes, pos


def _render(nodes, env, rng, out):
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
        elif node[0] == "alt":
            _render(pick(rng, node[1]), env, rng, out)
        elif node[0] == "pool":
            _render(_compile(pick(rng, POOLS[node[1]])), env, rng, out)
        else:
            key = node[1]
            if key in env:
                out.append(env[key])
            else:
                value = env[key[0].lower() + key[1:]]
                out.append(value[0].upper() + value[1:])


def _compile(template):
    nodes = _compiled.get(template)
    if nodes is None:
        nodes, end = _parse(template, 0, "")
        assert end == len(template), template
        _compiled[template] = nodes
    return nodes


_article = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])(?!one\b|uni|use)")
_sentence_start = re.compile(r'(?:^|(?<=[.!?] )|(?<=\."\s))[a-z]')


def expand(template, env, rng, sentence=True):
    """Renders a template, then repairs what only shows after rendering: a/an and (unless `sentence` is off) capital letters."""
    out = []
    _render(_compile(template), env, rng, out)
    text = _article.sub(r"\1n ", "".join(out))
    return _sentence_start.sub(lambda m: m.group(0).upper(), text) if sentence else text


# --------------------------------------------------------------------------------------------------------------
# Words of the story world
# --------------------------------------------------------------------------------------------------------------

GIRLS = """Mia Lily Anna Nora Ella Rosa Clara Emma Zoe Ida Maya Ruby Hanna Lucy Tilda Nina Sara Eva Lena Marta Olga
Stella Wilma Freya Greta Alma Vera Julia Molly Daisy Hazel Ivy Elsa Kira Luna Penny Tessa Yara Amara Leila""".split()
BOYS = """Tom Ben Leo Max Sam Finn Noah Oskar Jack Emil Theo Adam Peter Hugo Milo Anton Paul Luke Jonah Otto Karl Felix
Erik Ravi Omar Diego Marco Ivan Simon Toby Arthur Henry Oliver Robin Kasper Jan Mateo Bruno Elias Rafi""".split()
SHE_PETS = """Pip Bella Coco Willow Poppy Hazel Nutmeg Clover Pearl Misty Olive Dot Biscuit Minnie Tansy Plum
Fern Honey Juniper Maple""".split()
HE_PETS = """Bruno Rufus Pepper Basil Moss Acorn Button Jasper Barley Pebble Wobble Humphrey Bramble Ziggy Dusty
Thistle Chestnut Rusty Fudge Hopper""".split()
ONSETS = "b c d f g h j k l m n p r s t v w y z br ch cl dr fl fr gr kl kr pl sh sl st th tr".split()
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ee", "oo", "ai", "ia"]
CODAS = "b d g k l m n p r t x z ck nd rt th ll nn".split()

FOREST_ANIMALS = ["fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "badger", "owl", "deer", "wolf", "mole", "raccoon", "hare"]
WATER_ANIMALS = ["duck", "frog", "otter", "turtle", "beaver", "swan", "heron"]
SEA_ANIMALS = ["cat", "seagull", "otter", "seal", "crab", "turtle", "puffin", "dog"]
FARM_ANIMALS = ["dog", "cat", "goat", "pig", "lamb", "donkey", "goose", "hen", "pony", "cow", "mouse"]
SNOW_ANIMALS = ["penguin", "fox", "bear", "wolf", "hare", "seal", "owl"]
JUNGLE_ANIMALS = ["monkey", "elephant", "lion", "tiger", "parrot", "giraffe", "zebra", "snake"]

SETTINGS = {
    "sea": dict(
        where=["in a small village by the sea", "in a little fishing village by the sea", "in a quiet town by the sea", "on a small green island", "in a village at the edge of the sea", "near a long white beach"],
        home=["a small white house near the beach", "a blue house beside the harbour", "a little cottage with a red door", "a wooden house on the cliff"],
        spots=["the beach", "the harbour", "the old lighthouse", "the market square", "the rocks", "the sand dunes", "the fishing boats", "the little pier"],
        elders=[("old fisherman", "he"), ("lighthouse keeper", "he"), ("boat builder", "he"), ("old sailor", "he"), ("woman who sold fish", "she"), ("baker", "she"), ("old woman from the harbour", "she")],
        likes=["collecting shells", "watching the boats come in", "listening to the waves", "playing in the sand", "counting the seagulls"],
        sound="the waves", animals=SEA_ANIMALS, water="the sea"),
    "hills": dict(
        where=["in a small village in the hills", "in a valley between two mountains", "in a village on a green hill", "high in the mountains", "in a little village below a snowy mountain"],
        home=["a stone house with a green roof", "a small house at the end of the road", "a little cottage on the hill", "a house beside the well"],
        spots=["the old well", "the stone bridge", "the windmill", "the apple trees", "the bell tower", "the sheep field", "the mountain path", "the village square"],
        elders=[("old shepherd", "he"), ("miller", "he"), ("baker", "he"), ("clockmaker", "he"), ("old woman at the well", "she"), ("teacher", "she"), ("blacksmith", "he")],
        likes=["running down the hill", "feeding the sheep", "looking at the clouds", "picking flowers", "ringing the little bell"],
        sound="the wind", animals=["goat", "dog", "cat", "lamb", "hare"], water="the lake"),
    "forest": dict(
        where=["in a deep green forest", "at the edge of a great forest", "in a quiet forest", "in the middle of an old forest", "in a forest full of tall trees"],
        home=["a cosy house under an old oak tree", "a warm little home among the roots", "a small wooden house between two trees", "a snug home behind a mossy rock"],
        spots=["the big oak tree", "the stream", "the clearing", "the mossy rocks", "the berry bushes", "the hollow log", "the old stone wall", "the fern path"],
        elders=[("old owl", "she"), ("wise old turtle", "he"), ("old badger", "he"), ("grandmother hedgehog", "she"), ("big brown bear", "he")],
        likes=["picking berries", "jumping over the stream", "climbing trees", "listening to the birds", "looking for mushrooms"],
        sound="the leaves", animals=FOREST_ANIMALS, water="the stream"),
    "river": dict(
        where=["in a village by a wide river", "beside a slow green river", "near a quiet pond", "by a clear blue lake", "in a little house by the river"],
        home=["a small house with a wooden gate", "a green house beside the water", "a little home near the reeds", "a round house under a willow tree"],
        spots=["the wooden bridge", "the willow tree", "the mill", "the tall reeds", "the flat stones", "the little island", "the ferry", "the river bank"],
        elders=[("ferryman", "he"), ("miller", "he"), ("old heron", "he"), ("grandmother frog", "she"), ("old woman with the boat", "she"), ("wise old turtle", "he")],
        likes=["floating leaves on the water", "watching the fish", "skipping stones", "singing by the water", "building little dams"],
        sound="the water", animals=WATER_ANIMALS, water="the river"),
    "farm": dict(
        where=["on a small farm", "on a sunny farm near the hills", "on a farm with a big red barn", "on an old farm at the end of a long road"],
        home=["a warm corner of the red barn", "a little house behind the barn", "a yellow house beside the field", "a small house with a garden"],
        spots=["the red barn", "the duck pond", "the corn field", "the garden gate", "the haystack", "the apple trees", "the wooden fence", "the old cart"],
        elders=[("farmer", "he"), ("old horse", "he"), ("grandmother goose", "she"), ("old donkey", "he"), ("farmer's wife", "she"), ("postman", "he")],
        likes=["rolling in the hay", "chasing butterflies", "watching the sun come up", "eating sweet apples", "counting the chickens"],
        sound="the wind", animals=FARM_ANIMALS, water="the pond"),
    "town": dict(
        where=["in a busy little town", "in a small town with narrow streets", "in a town with many bridges", "in a town near the railway", "on a quiet street in a big city"],
        home=["a tall house with yellow windows", "a small flat above the bakery", "a narrow house with a blue door", "a little house near the park"],
        spots=["the park", "the bakery", "the library", "the fountain", "the train station", "the school yard", "the market", "the clock tower"],
        elders=[("baker", "she"), ("librarian", "she"), ("postman", "he"), ("clockmaker", "he"), ("gardener", "he"), ("old woman with the flower shop", "she"), ("train driver", "he")],
        likes=["reading books", "feeding the birds", "watching the trains", "drawing pictures", "smelling fresh bread"],
        sound="the bells", animals=["cat", "dog", "mouse", "pigeon", "parrot"], water="the canal"),
    "snow": dict(
        where=["in a cold land of snow", "in a village where winter was long", "far in the white north", "in a little house in the snow"],
        home=["a warm little house made of wood", "a round house of snow and ice", "a snug home under the snow", "a small house with a smoking chimney"],
        spots=["the frozen lake", "the pine trees", "the snowy hill", "the ice cave", "the wooden sledge", "the north road", "the big white rock"],
        elders=[("old hunter", "he"), ("grandmother bear", "she"), ("wise white owl", "she"), ("sledge maker", "he"), ("old woman by the fire", "she")],
        likes=["sliding down the hill", "watching the northern lights", "catching snowflakes", "making snow animals", "skating on the ice"],
        sound="the wind", animals=SNOW_ANIMALS, water="the cold lake"),
    "jungle": dict(
        where=["in a warm green jungle", "in a jungle full of flowers", "on a wide golden plain", "in a sunny land far away"],
        home=["a shady home under a palm tree", "a cool cave behind the waterfall", "a soft bed of leaves", "a little home between the tall grasses"],
        spots=["the waterfall", "the palm trees", "the water hole", "the tall grass", "the mango tree", "the big round rock", "the muddy river"],
        elders=[("old elephant", "she"), ("wise old monkey", "he"), ("grandmother giraffe", "she"), ("old tortoise", "he")],
        likes=["swinging on the vines", "splashing in the water", "telling jokes", "eating sweet fruit", "watching the stars"],
        sound="the insects", animals=JUNGLE_ANIMALS, water="the water hole"),
    "kingdom": dict(
        where=["in a small kingdom", "in a castle on a hill", "in a kingdom behind the mountains", "in a quiet kingdom with a kind queen"],
        home=["a small room in the tower", "a little house below the castle", "a bright room with a round window", "a house beside the castle gate"],
        spots=["the castle gate", "the rose garden", "the tall tower", "the stables", "the royal kitchen", "the old well", "the throne room", "the bridge"],
        elders=[("kind queen", "she"), ("old king", "he"), ("royal cook", "she"), ("gardener", "he"), ("wise old wizard", "he"), ("captain of the guard", "he")],
        likes=["exploring the castle", "reading old maps", "riding a little pony", "talking to the cook", "watching the flags in the wind"],
        sound="the flags", animals=["cat", "dog", "mouse", "pony", "dragon", "frog"], water="the castle pond"),
}

COLOURS = ["red", "blue", "green", "yellow", "golden", "silver", "white", "purple", "orange", "brown"]
THINGS = ["kite", "boat", "ball", "lantern", "scarf", "bell", "drum", "hat", "basket", "whistle", "key", "book", "blanket", "cup", "flute", "ring", "feather", "button"]
TRAITS = ["curious", "kind", "brave", "cheerful", "clever", "shy", "gentle", "lively", "patient", "quiet", "friendly", "dreamy", "careful", "stubborn"]
FOODS = ["bread", "apples", "berries", "cheese", "honey cake", "soup", "pears", "nuts", "carrots", "pancakes", "plums", "cookies"]
BABIES = ["kitten", "duckling", "baby bird", "puppy", "lamb", "little rabbit", "baby hedgehog", "small turtle"]

POOLS = {
    "said": ["said", "answered", "replied", "said"],
    "asked": ["asked", "asked", "wondered"],
    "cried": ["cried", "called", "shouted"],
    "day": ["one day", "one morning", "one sunny morning", "one afternoon", "one bright day", "one spring morning", "one summer day", "early one morning", "one windy day", "one autumn day"],
    "soon": ["soon", "after a while", "before long", "a little later", "in a short time"],
    "at last": ["at last", "finally", "in the end", "at long last"],
    "so": ["so", "and so", "then"],
    "sad": ["sad", "very sad", "unhappy", "worried", "close to tears"],
    "happy": ["happy", "very happy", "full of joy", "so happy", "glad", "delighted"],
    "weather": [
        "The sun was shining and the sky was [blue|clear|bright].",
        "The air was [fresh|cool|warm] and {sound} [sang softly|could be heard all around|made a soft sound].",
        "A soft wind was blowing and [small white clouds|a few clouds] [moved|drifted] across the sky.",
        "It was a [bright|warm|lovely|quiet] day, and [everything seemed to smile|there was not a cloud in the sky|birds were singing].",
        "[Bees were humming|Birds were singing], and the air smelled of [flowers|rain|fresh bread].",
        "[Far away|Somewhere], a [bell was ringing|dog was barking|rooster was crowing], and the day was [just beginning|still young].",
        "It had rained in the night, and [the grass|the path|everything] was still [wet|shining].",
    ],
    "evening": [
        "[That evening|In the evening], the sky turned [red|pink|gold] [and the first stars came out|and everything grew quiet].",
        "When the sun went down, [they all sat together|everyone went home|a warm light shone in the windows].",
        "The moon came up, [round and bright|big and yellow|white and quiet].",
    ],
    "moral": [
        "{N} had learned [something important|a good lesson]: {lesson}.",
        "[From that day on|After that day|Since then], {N} [knew|never forgot] that {lesson}.",
        "And whenever {N} thought of that day, {he} remembered that {lesson}.",
    ],
    "close": [
        "That night, {N} fell asleep with a smile.",
        "[Before {he} went to sleep|At bedtime], {N} thought of the day and smiled.",
        "The next day, {N} went back to {like}, and everything was [good|just as it should be].",
        "[It had been a long day|It had been a good day], and {N} was [tired|sleepy] but <happy>.",
        "\"What a day!\" said {N}, and fell asleep at once.",
        "{N} [went home|walked home] with a [light|warm|happy] heart.",
        "And they all lived happily for a long, long time.",
        "{N} told {parent} everything, and {parent} was very proud.",
        "The stars were shining when {N} [went home|came home], and {he} was <happy>.",
        "And if you go there today, you may still [hear|find someone who tells] this story.",
    ],
    "meet": [
        "[On the way|On the path|Near {s2}], {he} met {friend}.",
        "[Just then|Then] {friend} came [along|by|around the corner].",
        "[After a while|A little later], {friend} came by and [stopped|sat down].",
    ],
    "what wrong": [
        "\"What is wrong?\" asked {F}.",
        "\"Why do you look so [sad|worried]?\" asked {F}.",
        "\"Hello, {N}. Is everything all right?\" asked {F}.",
        "\"You look [sad|worried] today,\" said {F}. \"What happened?\"",
    ],
    "help": [
        "\"Do not worry,\" said {F}. \"I will help you.\"",
        "\"Let us [do it|try] together,\" said {F}. \"Two are better than one.\"",
        "\"Then I will come with you,\" said {F}, and {N} felt [a little better|less alone].",
        "\"I have an idea,\" said {F}. \"Come with me.\"",
        "\"You are not alone,\" said {F}. \"What shall we do first?\"",
        "\"Do not be sad,\" said {F}. \"We will find a way.\"",
    ],
    "thanks": [
        "\"Thank you,\" said {N}. \"You are a [true|good|real] friend.\"",
        "\"Thank you so much, {F}!\" said {N}.",
        "\"I could not have done it without you,\" said {N}.",
        "{N} hugged {F} and said thank you [again and again|three times|many times].",
    ],
    "laugh": [
        "They looked at each other and [laughed|began to laugh].",
        "They both laughed until [their bellies hurt|they had to sit down].",
        "{F} smiled, and {N} smiled too.",
        "They were so [happy|glad] that they [sang all the way home|danced in a circle|forgot how tired they were].",
        "{N} [laughed|danced around|clapped and jumped] for joy.",
    ],
    "elder says": [
        "\"{advice},\" said {e} [with a smile|in a kind voice|slowly].",
        "{E} [thought for a moment|looked up|nodded slowly]. \"{advice},\" {ehe} said.",
    ],
}

PRONOUNS = {
    "she": dict(he="she", him="her", his="her", himself="herself"),
    "he": dict(he="he", him="him", his="his", himself="himself"),
}


def made_up_name(rng):
    """A name the model has not seen, so that it learns to copy names instead of only recalling them."""
    count = rng.choice([1, 2, 2, 3])
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)]
    coda = rng.choice(CODAS) if count == 1 or rng.random() < 0.4 else ""
    return "".join(syllables + [coda]).capitalize()


def character(rng, setting, animal, species=None, name=None, friend=False):
    """A name, what kind of creature it is, and its pronouns. Friends mostly have other names than heroes."""
    pronoun = "she" if name in GIRLS else "he" if name in BOYS else pick(rng, ["she", "he"])
    if animal:
        kind = species or pick(rng, SETTINGS[setting]["animals"])
        pronoun = "she" if kind in ("queen", "witch", "woman", "fairy") else "he" if kind in ("king", "wizard", "man", "knight") else pronoun
        names = SHE_PETS if pronoun == "she" else HE_PETS
    else:
        kind = species or ("girl" if pronoun == "she" else "boy")
        if kind in ("girl", "princess"):
            pronoun = "she"
        elif kind in ("boy", "prince"):
            pronoun = "he"
        names = GIRLS if pronoun == "she" else BOYS
    if name is None:
        name = made_up_name(rng) if rng.random() < 0.12 else pick(rng, names[::-1] if friend else names)
    return name, kind, pronoun


CHILD_KINDS = ("girl", "boy", "princess", "prince")


class Tale:
    """One story being told: who and where, the sentences so far, and the facts a reader could be asked about."""

    def __init__(self, rng, species=None, name=None, setting=None, thing=None, brief=False):
        self.rng = rng
        self.brief = brief
        if setting is None:
            fitting = [s for s in SETTINGS if species is None or species in CHILD_KINDS or species in SETTINGS[s]["animals"]]
            setting = pick(rng, fitting or ["forest", "farm", "river"])
        world = SETTINGS[setting]
        if species is None:
            animal = setting in ("forest", "jungle") or (setting in ("farm", "river", "snow") and rng.random() < 0.55) or rng.random() < 0.12
        else:
            animal = species not in CHILD_KINDS
        if species is None and setting == "kingdom" and not animal and rng.random() < 0.6:
            species = rng.choice(["princess", "prince"])
        hero, kind, pronoun = character(rng, setting, animal, species, name)
        friend = hero
        friend_animal = animal or rng.random() < 0.15
        while friend == hero:
            friend, fkind, fpronoun = character(rng, setting, friend_animal, friend=True)
            if friend_animal and fkind == kind and rng.random() < 0.9:
                friend = hero
        spots = list(world["spots"])
        spots = [spots.pop(i % len(spots)) for i in (skewed(rng, 8), -1 - skewed(rng, 7), skewed(rng, 6))]
        elder, epronoun = pick(rng, world["elders"])
        self.setting = setting
        self.animal = animal
        env = dict(PRONOUNS[pronoun])
        env.update({"f" + key: value for key, value in PRONOUNS[fpronoun].items()})
        env.update({"e" + key: value for key, value in PRONOUNS[epronoun].items()})
        env.update(
            N=hero, kind=kind, F=friend, fkind=fkind, e="the " + elder,
            where=pick(rng, world["where"]), home=pick(rng, world["home"]), s1=spots[0], s2=spots[1], s3=spots[2],
            like=pick(rng, world["likes"]), sound=world["sound"], water=world["water"], trait=pick(rng, TRAITS),
            ftrait=pick(rng, TRAITS), thing=thing or pick(rng, COLOURS) + " " + pick(rng, THINGS),
            food=pick(rng, FOODS), baby=pick(rng, BABIES), parent=env["his"] + " " + pick(rng, ["mother", "father", "grandmother", "grandfather"]),
            lesson="", advice="")
        env["ob"] = env["thing"].split()[-1]
        self.env = env
        self.paragraphs = [[]]
        self.facts = {}

    def say(self, *options, **extra):
        """Adds one sentence (or a few), drawn from the options."""
        self.env.update(extra)
        self.paragraphs[-1].append(expand(pick(self.rng, options), self.env, self.rng))

    def maybe(self, chance, *options):
        """Adds a sentence that the story can do without."""
        if self.rng.random() < (chance * 0.4 if self.brief and chance < 0.6 else chance):
            self.say(*options)

    def para(self):
        if self.paragraphs[-1]:
            self.paragraphs.append([])

    def text(self):
        return "\n\n".join(" ".join(p) for p in self.paragraphs if p)


def classic_opening(t):
    """The first sentence of a tale, as tales begin."""
    t.say(
        "Once upon a time, {where}, there lived a [little|{trait}|young|{trait} little] {kind} [named|called] {N}.",
        "Once upon a time, there was a [little|{trait}|young|{trait} little] {kind} [named|called] {N}, who lived {where}.",
        "Once upon a time, {where}, there was a {trait} {kind} [whose name was|named|called] {N}.",
        "{N} was a {trait} [|little |young ]{kind} who lived {where}.",
        "{Where}, there lived a {trait} [|little |young ]{kind} [named|called] {N}.",
        "Long ago, {where}, there lived a {trait} {kind} [named|called] {N}.",
        "There once was a {trait} {kind} [named|called] {N}. {He} lived {where}.",
        "This is the story of {N}, a {trait} {kind} who lived {where}.",
    )


def free_opening(t):
    """Other first sentences, so that a prompt which is not "Once upon a time" leads to a story as well."""
    t.say(
        "The {kind} {N} lived {where}.",
        "The [|little |young |{trait} ]{kind} [was called|had a name: it was] {N}. {He} lived {where}.",
        "{N} lived {where}.",
        "{N} was a {kind}. {He} lived {where} [with {parent}|and was very {trait}].",
        "It was a [dark and stormy|dark|cold|quiet|warm|starry] night {where}. A {kind} named {N} [could not sleep|was still awake|sat at the window].",
        "It was a [beautiful|sunny|cold|rainy|quiet|lovely] [day|morning|evening] {where}. A {kind} named {N} [was on the way home|had just woken up|was looking out at {water}].",
        "It all began {where}, where a {trait} {kind} named {N} lived.",
        "On a [cold winter|warm summer|bright spring|grey autumn] [day|morning], a {kind} named {N} [looked out of the window|went for a walk]. {He} lived {where}.",
        "The sun [was shining|had just come up|was going down] {where}. A {trait} {kind} named {N} was [singing|awake|on the way home].",
        "[Have you ever heard of|Do you know] {N}, the {trait} {kind}? {He} lived {where}.",
        "A [|little |young ]{kind} [named|called] {N} lived {where}.",
        "My [friend|grandmother|grandfather] [once told me|told me a story] about {N}, a {trait} {kind} who lived {where}.",
        "There was a {kind} [named|called] {N}, and {he} was very {trait}. {He} lived {where}.",
        "[Last summer|Many years ago|A long time ago|Every evening|When the world was young], a {kind} named {N} [sat|was sitting] near {s1} and looked at {water}.",
        "I [want to|will] tell you about {N}, a {trait} {kind} who lived {where}.",
        "We [all ]knew {N}, the {trait} {kind} who lived {where}.",
    )


def opening(t, introduce_friend):
    """Who the story is about. Plots in which the friend simply is there need the friend introduced here."""
    if not t.brief and t.rng.random() < 0.3:
        free_opening(t)
    else:
        classic_opening(t)
    t.maybe(0.65, "{He} lived in {home}[|| with {parent}].", "{His} home was {home}.", "{He} lived with {parent} in {home}.")
    t.maybe(
        0.75,
        "{He} loved {like} [more than anything else|every day|all day long].",
        "{He} [liked|loved] {like}, and {he} was [always|almost always] [happy|busy].",
        "Every [morning|day|afternoon], {he} spent [a little time|an hour|hours] {like}.",
    )
    t.env["friend"] = "a {ftrait} {fkind} named {F}".format(**t.env)
    if introduce_friend:
        t.env["friend"] = t.env["F"]
        t.say(
            "{He} had a [good|very good|dear] friend, a {ftrait} {fkind} named {F}.",
            "{He} had one very good friend, and that was {F}, a {ftrait} {fkind}.",
            "{His} best friend was {F}, a {ftrait} {fkind}.",
        )
    else:
        t.maybe(0.2, "Everyone knew {N}, [because {he} was so {trait}|and {N} knew everyone].")


# --------------------------------------------------------------------------------------------------------------
# Plots: each is one kind of story, beat by beat
# --------------------------------------------------------------------------------------------------------------


def plot_lost(t):
    """A treasured thing is lost, looked for, and found."""
    t.facts.update(problem="{N} lost {his} {thing}", solved="{F} helped {him} to look for it, and they found it near {s3}", helper="{F}", object="a {thing}", theme="a lost {ob}")
    t.env["lesson"] = pick(t.rng, ["a friend makes every search shorter", "it is good to ask for help", "lost things can be found if you do not give up"])
    t.say("{N} had a {thing} [that {parent} had made|from {parent}|that {he} took everywhere], and {he} loved it very much.",
          "The thing {he} loved most was a {thing}. [{Parent} had made it for {him}.|It was a present from {parent}.]",
          "{N} always carried a {thing}. It was [old and a little worn|not new], but {he} would not have given it away for anything.")
    t.para()
    t.say("<day>, {N} woke up and looked for the {ob}, but it was gone.",
          "<day>, the {ob} was gone.",
          "But <day>, {N} [noticed|saw] that the {thing} was missing.",
          "<day>, {N} came home from {s1} and saw that the {ob} was [gone|not there].")
    t.say("{He} looked under the bed, behind the door and [in every corner|even in the soup pot], but {he} could not find it.",
          "\"Where is my {ob}?\" {he} <cried>. {He} looked everywhere at home, but it was not there.",
          "{N} felt <sad>. {He} looked [here and there|up and down|inside and outside], but there was no {ob}.")
    t.say("First {he} went to {s1}. {He} looked [for a long time|carefully], but the {ob} was not there.",
          "{He} ran to {s1}, because {he} had been there the day before. But {he} found nothing [but dust|but a few leaves|at all].",
          "\"Maybe I left it at {s1},\" {he} thought. But there was no {ob} at {s1}.")
    t.para()
    t.say("<meet>")
    t.say("<what wrong>")
    t.say("\"I have lost my {thing},\" said {N}. \"I have looked everywhere.\"",
          "\"My {ob} is gone,\" said {N}, \"and I do not know where to look.\"",
          "{N} told {F} about the {thing}.")
    t.say("<help>")
    t.env["advice"] = pick(t.rng, ["Think of the last place where you were happy", "Look where the wind goes", "I saw something " + t.env["thing"].split()[0] + " near " + t.env["s3"]])
    t.maybe(0.35, "They asked {e}. <elder says>", "They met {e} near {s2}. <elder says>")
    t.say("<so> they went to {s3} together. {F} looked [high|on the left] and {N} looked [low|on the right].",
          "Together they walked to {s3} and searched [every corner|behind every stone|slowly and carefully].",
          "They went from {s2} to {s3}, and {F} [sang a little song to cheer {him} up|looked at everything twice].")
    t.para()
    ending = t.rng.random()
    if ending < 0.5:
        t.say("\"Look!\" <cried> {F}. There was the {thing}, [hanging from a branch|lying between two stones|half hidden in the grass]. The wind had carried it there.",
              "<at last>, {N} saw something small and bright [in the grass|between the stones|in the shadows]. It was the {ob}! It had [fallen down|rolled there] the day before.",
              ob2="small and bright")
        t.say("{N} held the {ob} tight and [laughed|jumped for joy|could not stop smiling].", "{N} was <happy>. {He} [picked it up|held it close] and [cleaned it carefully|looked at it from all sides].")
    else:
        t.say("There, near {s3}, they found the {thing}. A {baby} was [sitting beside it|sleeping beside it|holding on to it].",
              "<at last>, they found it. But a {baby} had [curled up beside it|taken it for its bed], [cold and alone|and it was fast asleep].")
        t.say("\"The poor little one was cold,\" said {N} softly. \"It can [stay with us|keep it for tonight].\"",
              "{N} was not angry at all. \"You [may come home with us|can share it with me],\" {he} said to the {baby}.")
    t.say("<thanks>")
    t.maybe(0.35, "<laugh>")


def plot_baby(t):
    """A small lost creature is brought home."""
    t.facts.update(problem="{N} found a lost {baby}", solved="{N} and {F} brought the {baby} back to its mother", helper="{F}", object="a {baby}", theme="a lost {baby}")
    t.env["lesson"] = pick(t.rng, ["even small help can be big for someone", "kindness always finds its way home", "the smallest voice is worth listening to"])
    t.para()
    t.say("<day>, {N} was [walking|playing] near {s1} when {he} heard a [small|soft|thin] sound.",
          "<day>, while {N} was on the way to {s1}, {he} heard someone [crying|calling] softly.",
          "<day>, {N} went out early. <weather> Near {s1}, {he} heard a tiny voice.")
    t.say("{He} looked around and found a {baby}. It was [wet and cold|shaking|all alone|hungry and tired].",
          "There, [under a leaf|between two stones|in the tall grass], sat a {baby}, all alone.",
          "It was a {baby}, and it [had lost its mother|did not know the way home].")
    t.say("\"Do not be afraid,\" said {N}. \"I will [help you|take care of you].\"",
          "\"Poor little thing,\" said {N}. \"Where is your mother?\" The {baby} [only looked at {him} with big eyes|did not know].",
          "{N} [sat down beside it|came closer very slowly] and spoke in a soft voice, so that the {baby} would not be afraid.")
    t.say("{He} gave it some {food} and [a little water|kept it warm].", "{He} [wrapped it in a warm cloth|kept it warm] and shared {his} {food} with it.", "The {baby} was hungry, so {N} gave it [a little|some] {food}.")
    t.para()
    t.say("<meet>")
    t.say("\"Look what I found,\" said {N}. \"It is lost.\"", "\"This {baby} has lost its mother,\" said {N}. \"We must find her.\"")
    t.say("<help>", "\"I think I saw its mother near {s2},\" said {F}. \"Come, I will show you.\"")
    t.say("They went to {s2} and called, but nobody answered.", "They asked everyone they met, but nobody had seen the mother.", "First they looked near {s2}, but there was only [the wind|an empty path].")
    t.maybe(0.35, "The {baby} began to cry, and {N} [sang a quiet song for it|told it a funny story].", "It was getting late, but {N} did not want to give up.")
    t.say("Then they asked {e}. \"[Go to|Look near] {s3},\" {ehe} said. \"I heard somebody calling there.\"",
          "Then they met {e}. \"A mother is looking for her little one near {s3},\" said {e}.",
          "\"Listen!\" said {F}. From {s3} came a [worried|loud|sad] voice.")
    t.para()
    t.say("They ran to {s3} as fast as they could. There was the mother, [looking behind every stone|calling and calling]!",
          "And there, near {s3}, the mother was waiting. When she saw her little one, she [cried for joy|ran to it at once].")
    t.say("The {baby} [jumped into her arms|ran to her|made a happy little sound], and they held each other for a long time.",
          "\"Thank you for bringing my little one home,\" she said to {N} and {F}.")
    t.say("{N} felt warm inside. \"I will visit you [tomorrow|soon],\" {he} promised.",
          "After that, the {baby} came to visit {N} [every week|every Sunday|whenever the sun was shining].")


def plot_storm(t):
    """Bad weather comes, and someone needs help."""
    storm, calm = pick(t.rng, [("storm", "storm"), ("storm", "storm"), ("big storm", "storm"), ("heavy rain", "rain")])
    if t.setting == "snow":
        storm, calm = "snow storm", "storm"
    t.facts.update(problem="a {storm} came", solved="{N} brought {e} to a safe place, and they all waited together", helper="{F}", object="a rope", theme="a storm")
    t.env["lesson"] = pick(t.rng, ["together you can wait for the sun", "a warm home is best when it is shared", "being brave means helping even when you are afraid"])
    t.para()
    t.say("<day>, dark clouds came over {s1}.", "<day>, the sky turned grey, then dark, then almost black.", "<day>, {e} looked at the sky and said, \"A {storm} is coming.\"", storm=storm, calm=calm)
    t.say("The wind [blew|howled] around the houses and [the windows shook|doors began to bang|the trees bent low].", "{Sound} grew louder and louder, and the first cold drops fell.", "Everyone [hurried home|closed the doors and windows|brought everything inside].")
    t.say("{N} was already at home when {he} thought of {e}. \"{Ehe} is all alone near {s2}!\" {he} <cried>.",
          "Then {N} remembered that {e} was still near {s2}, and that {ehe} could not walk fast.",
          "\"Where is {e}?\" asked {N}. Nobody had seen {ehim} since the morning.")
    t.para()
    t.say("{N} was afraid, but {he} did not wait. {He} took a lantern and a [long|strong] rope and ran to {F}.",
          "{N} [took a rope|took a warm blanket] and went to find {F}. \"I cannot do this alone,\" {he} said. \"Will you come with me?\"")
    t.say("\"Of course,\" said {F}. \"Let us hold on to each other.\"", "\"I am afraid too,\" said {F}, \"but I will come with you.\"", "{F} did not even ask why. They [went|ran] out together.")
    t.say("Step by step, they walked through the {calm} to {s2}.", "The wind pushed them back, but they went on, step by step.", "They could hardly see the path, so they [counted their steps|followed the old wall|held the rope tight].")
    t.say("There was {e}, [sitting under an old roof|holding on to a tree|cold and tired].", "Near {s2}, they found {e}. {Ehe} had hurt {ehis} foot and could not walk.")
    t.say("\"I knew that somebody would come,\" said {e}.", "\"You came for me!\" said {e}, and {ehis} eyes were wet.", "\"Lean on us,\" said {N}. \"We will bring you home.\"")
    t.para()
    t.say("Together they went back to the [house|home] of {N}, where it was warm and dry.", "<soon>, all three were sitting in the [house|home] of {N}, warm and safe.")
    t.say("They [drank hot milk|ate hot soup|ate {food}] and {e} told them [old stories|a story about a much bigger storm] until the {calm} was over.", "{Parent} gave everyone some {food}, and they listened to the wind outside.")
    t.say("In the morning, the sun was shining again, and the world was [clean and bright|wet and quiet].", "The next morning, the {calm} was gone. The sky was blue again, and everyone came out to [repair the roofs|look around].")
    t.maybe(0.7, "\"You saved me,\" {e} told them. \"I will not forget it.\"", "Everyone was proud of {N} and {F}.")


def plot_share(t):
    """Food is shared with someone hungry, and the kindness comes back."""
    t.facts.update(problem="{N} met {e}, who was hungry", solved="{N} shared {his} {food} with {ehim}", helper="{e}", object="some {food}", theme="sharing")
    t.env["lesson"] = pick(t.rng, ["what you share comes back to you", "food tastes best when it is shared", "there is always enough for one more"])
    t.para()
    t.say("<day>, {parent} gave {N} some {food} for the long walk to {s1}.", "<day>, {N} had some {food} with {him}, and {he} was looking forward to eating it at {s1}.", "<day>, {N} packed some {food} in a little bag and set off for {s1}.")
    t.maybe(0.35, "<weather>")
    t.say("Near {s2}, {he} saw {e} sitting [by the path|on a stone|in the shade].", "[Half way there|On the way], {he} met {e}, who looked [pale and tired|tired and hungry].")
    t.say("\"I have not eaten since yesterday,\" said {e}.", "\"Have you lost your way?\" asked {N}. \"No,\" said {e}, \"I am only hungry.\"", "\"Good day,\" said {e}. \"That {food} smells [good|wonderful].\"")
    t.say("{N} looked at the {food}. There was not much of it. But then {he} [smiled|sat down] and gave {ehim} half.",
          "{N} was hungry too. But {he} thought, \"I can eat at home, and {ehe} cannot.\" So {he} gave {ehim} [half of it|the bigger half].",
          "\"Here,\" said {N}. \"There is enough for two.\"")
    t.say("They ate together and [talked about {like}|watched the clouds|laughed a lot].", "They sat side by side and ate, and {N} thought that {food} had never tasted so good.")
    t.say("\"You have a good heart,\" said {e}. \"I will not forget this.\"", "\"Thank you, little {kind},\" said {e}. \"One day I will help you too.\"")
    t.para()
    t.say("A few days later, {N} [lost {his} way|got lost] near {s3}. It was getting dark, and {he} did not know where to go.",
          "Not long after, {N} fell into a deep hole near {s3} and could not get out.",
          "The next week, [a cold rain came down|the path was under water] and {N} was stuck near {s3}.")
    t.say("\"Help!\" {he} called. \"Is anybody there?\"", "{He} called and called, but {he} heard only {sound}.")
    t.say("Then a light came closer. It was {e}! \"I know that voice,\" {ehe} said.", "Suddenly somebody called {his} name. It was {e}.")
    t.say("{E} took {him} by the hand and brought {him} home." if not t.animal else "{E} showed {him} the way and brought {him} home.", "{E} helped {him} and walked with {him} all the way home.")
    t.say("\"You helped me, and now I could help you,\" said {e}.", "\"Do you remember the {food}?\" asked {e}. \"It was the best meal of my life.\"")


def plot_fear(t):
    """A fear is overcome with a friend's help."""
    fear, deed = pick(t.rng, [
        ("the dark", "walk through the dark"), ("deep water", "swim"), ("high places", "climb up"),
        ("loud noises", "stay calm"), ("thunder", "listen to the thunder"), ("speaking in front of others", "speak in front of everyone")])
    t.facts.update(problem="{N} was afraid of {fear}", solved="{F} helped {him} to be brave, step by step", helper="{F}", object="a small song", theme="being brave")
    t.env["lesson"] = pick(t.rng, ["brave is what you are when you are afraid and try anyway", "big fears become small, one step at a time", "a friend beside you makes the dark less dark"])
    t.say("But there was one thing that {N} did not like: {he} was afraid of {fear}.", "{N} was afraid of {fear}, but {he} had never told anybody.", "There was only one problem. {N} was very much afraid of {fear}.", fear=fear, deed=deed)
    t.maybe(0.35, "When the others [laughed and played|went on ahead], {he} [stayed behind|found a reason to go home].", "{He} was a little ashamed of it.")
    t.para()
    t.say("<day>, {F} came to the door. \"We are all going to {s1},\" said {F}. \"Will you come?\"", "<day>, {F} had an idea. \"Let us go to {s1} together!\"", "<day>, everybody was going to {s1}, and {F} wanted {N} to come too.")
    t.say("{N} looked down. \"I cannot,\" {he} said. \"I am afraid of {fear}.\"", "\"I would like to,\" said {N} quietly, \"but I am afraid.\"", "{N} [shook {his} head|did not know what to say]. Then {he} told {F} the truth.")
    t.say("{F} did not laugh. \"Everybody is afraid of something,\" {fhe} said. \"I am afraid of [spiders|geese|big dogs|the dentist].\"", "\"That is all right,\" said {F}. \"I was afraid too when I was small. We can go slowly.\"", "\"Thank you for telling me,\" said {F}. \"Shall we try it together? Only one small step.\"")
    t.say("They began with one small step. {N} closed {his} eyes and [counted to ten|took a deep breath|hummed a song].", "So they went to {s1} together. At first, {N} only [watched|looked]. Then {he} came a little closer.", "{F} stayed close to {him}. \"If you want to stop, we stop,\" {fhe} said.")
    t.say("{His} heart was beating fast, but nothing bad happened.", "{N} was shaking, but {he} did not run away.", "It was [strange|hard], but not as bad as {he} had thought.")
    t.maybe(0.7, "The next day they tried again, and it was [a little easier|easier].", "\"One more step,\" {he} said to {himself}, \"and then one more.\"")
    t.para()
    t.say("<at last>, {N} opened {his} eyes. {He} had done it!", "After a week, {N} could {deed} all by {himself}.", "<soon>, {N} was not thinking about {fear} any more. {He} was too busy having fun.")
    t.say("\"I did it!\" <cried> {N}. \"I really did it!\"", "\"Look at me!\" <cried> {N}, and everybody [clapped|cheered].", "\"You were brave,\" said {F}. \"I was still afraid,\" said {N}. \"That is why it was brave,\" said {F}.")
    t.say("<thanks>", "<laugh>")


def plot_build(t):
    """Something is built, fails, and works at the second or third try."""
    what, use, fails, fix = pick(t.rng, [
        ("boat", "sail it on {water}", "it turned over and sank", "made it wider and put a flat stone in the bottom"),
        ("kite", "fly it above {s1}", "it fell down like a stone", "gave it a longer tail"),
        ("tree house", "see all the way to {s2}", "the floor fell down with a crash", "used longer pieces of wood and stronger rope"),
        ("cart", "bring apples to the market", "one wheel rolled away down the hill", "made new round wheels and a wooden pin for each"),
        ("bridge", "cross the little stream without wet feet", "it broke in the middle", "laid two big logs under it"),
        ("flying machine", "fly over {s1}", "it stayed on the ground", "made the wings lighter")])
    if what == "flying machine":
        t.facts["solved"] = "it hopped into the air for a moment, after {N} and {F} made it lighter"
    t.facts.update(problem="{N} wanted to build a {what}", solved="{N} and {F} tried again and {fix}", helper="{F}", object="a {what}", theme="building a {what}")
    t.env["lesson"] = pick(t.rng, ["every mistake is a small teacher", "the second try is often the better one", "two heads build better than one"])
    t.env.update(what=what, fix=fix, fails=fails, use=expand(use, t.env, t.rng, sentence=False))
    t.para()
    t.say("<day>, {N} had an idea. \"I will build a {what},\" {he} said, \"and then I can {use}.\"", "<day>, {N} wanted to build a {what}, so that {he} could {use}.", "{N} had a [dream|plan]: {he} wanted to build a {what} and {use}.")
    t.say("{He} collected wood, string and [an old piece of cloth|a handful of nails|some glue].", "{He} worked all morning near {s1}, [cutting|measuring|tying] and [singing|thinking|counting].", "{He} asked {e} for some wood, and {e} gave {him} [a whole pile|a few good pieces].")
    t.say("When it was ready, {he} called everyone to come and see. But {fails}.", "In the afternoon, the {what} was ready. {N} tried it at once, but {fails}.", "It looked [beautiful|almost right]. But when {N} tried it, {fails}.")
    t.say("{N} sat down and [was close to tears|said nothing for a long time]. \"I will never be able to do it,\" {he} said.", "Some of the others laughed. {N} felt <sad>.", "\"Oh no!\" <cried> {N}. \"All that work for nothing.\"")
    t.para()
    t.say("<meet>")
    t.say("\"It is a good {what},\" said {F}. \"It only has one mistake. Shall we find it together?\"", "\"My first {what} was much worse,\" said {F}. \"Let us look at what went wrong.\"", "{F} walked around the {what} twice and nodded. \"I think I know what is wrong,\" {fhe} said.")
    t.say("They talked and drew a plan in the [sand|dust|snow]." if t.setting in ("sea", "snow") else "They talked and drew a plan in the dust.", "They thought for a long time, and then they began again.", "{N} dried {his} eyes, and they went to work.")
    t.say("This time, they {fix}.", "They {fix}, and {F} held everything in place while {N} tied the knots.", "They took it apart, and then they {fix}.")
    t.para()
    if what == "flying machine":
        t.say("They pushed it down the hill, and for one [short|wonderful] moment it [hopped|rose] into the air.", "It did not fly far, but it flew. It hopped over a [bush|stone] like a [big|happy] frog.")
    else:
        t.say("And this time it worked! {N} could {use}, just as {he} had planned.", "They held their breath. It worked! Now {N} could {use}.", "Slowly, carefully, they tried it, and it worked. Everybody [cheered|clapped].")
    t.say("\"We did it!\" <cried> {N}.", "\"It was your idea,\" said {F}. \"And your help,\" said {N}.", "{E} came to look and [nodded|smiled]. \"Well done, you two,\" {ehe} said.")
    t.maybe(0.7, "<laugh>", "{N} painted the name of {F} on it in [red|blue|white] letters.")


def plot_race(t):
    """A race is lost on purpose, or won by helping."""
    t.facts.update(problem="there was a race, and {F} fell down", solved="{N} stopped and helped {F}, and they crossed the line together", helper="{N}", object="a blue ribbon", theme="a race")
    t.env["lesson"] = pick(t.rng, ["a friend is worth more than a prize", "it is not always the first one who wins", "running together is more fun than running alone"])
    t.para()
    t.say("Every [year|summer|spring], there was a big race from {s1} to {s2}.", "<day>, {e} called everyone together. \"Tomorrow there will be a race from {s1} to {s2}!\"")
    t.say("The prize was [a blue ribbon|a basket of {food}|a little silver bell], and {N} wanted to win it very much.", "{N} had practised for weeks. {He} ran to {s3} and back [every morning|every evening].", "{N} was not the fastest, but {he} never gave up.")
    t.maybe(0.7, "{F} wanted to run too. \"Let us both do our best,\" said {F}.", "\"I am [much|a little] faster than you,\" said {F}, and {N} said nothing.")
    t.say("On the day of the race, everybody stood at the line. \"One, two, three, go!\" called {e}, and they ran.", "The next morning, the sun was shining. {E} [rang a bell|waved a flag], and the race began.")
    t.para()
    t.say("At first, {F} was in front and {N} was close behind.", "{N} ran [as fast as the wind|as fast as {he} could], past {s3} and up the hill.", "They ran past {s3}. {N} could already see the end of the road.")
    t.say("Then {F} [fell over a root|slipped on a stone] and [cried out|hurt {fhis} foot].", "Suddenly there was a cry. {F} had fallen and could not get up.")
    t.say("{N} [looked at the line|saw the ribbon]. It was so near! But {he} looked back at {F}, and {he} stopped.", "The others ran on. {N} thought for a moment. Then {he} turned around.", "\"Go on!\" called {F}. \"You can still win!\" But {N} shook {his} head.")
    t.say("\"Come,\" said {N}. \"Lean on me. We will finish it together.\"", "\"A race is no fun without you,\" said {N}, and {he} helped {F} up.")
    t.say("Slowly, side by side, they walked to the end of the road.", "They were the last ones to reach {s2}, and they [crossed the line together|arrived side by side].")
    t.para()
    t.say("Nobody laughed. Everybody [clapped|cheered], even louder than for the winner.", "{E} came to them with [a smile|shining eyes]. \"We have two winners today,\" {ehe} said.")
    t.say("\"Why did you stop?\" asked {F}. \"Because you are my friend,\" said {N}.", "\"I will never forget what you did,\" said {F}.", "{E} gave them a prize of their own: some {food}, which they shared [at once|with everyone].")


def plot_quarrel(t):
    """Two friends quarrel and make up."""
    t.facts.update(problem="{N} and {F} had a quarrel about a {thing}", solved="{N} said sorry, and they shared the {ob}", helper="{e}", object="a {thing}", theme="friendship")
    t.env["lesson"] = pick(t.rng, ["a small word like sorry can open a big door", "a friend is better than any treasure", "it is easier to carry a thing together than to pull at it from two sides"])
    t.para()
    t.say("<day>, {N} and {F} found a {thing} near {s1}.", "<day>, {N} and {F} were playing near {s1} when they saw a {thing} [on the ground|in the grass].")
    t.say("\"I saw it first!\" said {N}. \"No, I saw it first!\" said {F}.", "\"It is mine,\" said {F}. \"No, it is mine,\" said {N}.", "Both of them wanted to have it, and neither wanted to give it away.")
    t.say("They pulled and [shouted|argued] until {F} [let go|went away]. \"Then keep it!\" <cried> {F}. \"I do not want to play with you any more.\"", "They became louder and louder. <at last>, {F} turned around and walked away without a word.")
    t.say("Now {N} had the {ob}. But {he} did not feel happy.", "{N} took the {ob} home. It was [beautiful|pretty], but somehow it was no fun to play alone.")
    t.say("The next day, {he} sat near {s2}, all by {himself}. Even {like} was no fun.", "For two days they did not speak. The days were long and [empty|quiet].")
    t.para()
    t.say("{E} came by and sat down next to {him}. \"Why are you alone today?\" {ehe} asked.", "{N} met {e} near {s2}. \"Where is {F}?\" asked {e}.")
    t.say("{N} told {ehim} everything.", "\"We had a quarrel,\" said {N}, and {he} told {ehim} about the {ob}.")
    t.say("<elder says>", advice=pick(t.rng, ["The one who is braver says sorry first", "A " + t.env["ob"] + " cannot laugh with you, but a friend can", "It is hard to be right and lonely at the same time", "Maybe somebody else is sad today too"]))
    t.say("{N} thought about it for a long time. Then {he} stood up and ran to {s3}, where {F} [was sitting|often played].", "{N} knew at once what to do. {He} took the {thing} and went to look for {F}.")
    t.say("\"I am sorry,\" said {N}. \"I want you to have the {ob}.\"", "\"I am sorry that I shouted,\" said {N}. \"You are more important than a {ob}.\"")
    t.say("\"I am sorry too,\" said {F}. \"Let us share it. One day you, one day me.\"", "{F} began to smile. \"I missed you,\" {fhe} said. \"We can both play with it.\"")
    t.para()
    t.say("From then on, the {ob} belonged to both of them.", "They played with the {thing} until [it was dark|the stars came out], and it was much more fun than before.")
    t.maybe(0.7, "<laugh>", "<evening>")


def plot_garden(t):
    """A seed, patience, and a harvest."""
    plant = pick(t.rng, ["sunflower", "pumpkin", "apple tree", "strawberry plant", "bean plant", "rose bush"])
    t.facts.update(problem="{N} planted a seed, and nothing happened for a long time", solved="{he} waited and gave it water every day, and a {plant} grew", helper="{e}", object="a seed", theme="a garden")
    t.env["lesson"] = pick(t.rng, ["good things need time", "patience is like water for a dream", "small things grow if you care for them"])
    t.para()
    t.say("<day>, {e} gave {N} a small [brown|black|round] seed. \"What will it be?\" asked {N}. \"Wait and see,\" said {e}.", "<day>, {N} found a small seed near {s1}. {He} showed it to {e}. \"Plant it,\" said {e}, \"and then be patient.\"", plant=plant)
    t.say("{N} made a hole in the soft earth near {s2}, put the seed in and gave it some water.", "{He} planted it near {s2}, where the sun was warm, and put [a ring of small stones|a little fence] around it.")
    t.say("The next morning, {he} ran to look. There was nothing but earth.", "Every morning, {he} [ran out|went] to see if it had grown. But there was nothing to see.")
    t.say("A week went by, and then another week. Still there was nothing.", "One week passed. Two weeks passed. {N} grew impatient.")
    t.maybe(0.7, "\"Maybe it is [sleeping|broken],\" said {F}. \"Maybe,\" said {N}, but {he} gave it water all the same.", "\"Why does it take so long?\" {he} asked {e}. \"It is busy,\" said {e}. \"It is making roots where you cannot see them.\"", "{F} laughed at first, but then {fhe} came to help with the water.")
    t.say("{N} gave it water when it was dry, and [sang to it|talked to it|told it stories] in the evening.", "When the sun was hot, {he} gave it shade. When the wind was strong, {he} [built a little wall|stayed close to it].")
    t.para()
    t.say("Then, <day>, there was a tiny green leaf. \"{F}, {F}, come and look!\" <cried> {N}.", "<at last>, after a warm rain, a little green tip [came out of the earth|looked out of the ground]. {N} danced for joy.")
    t.say("The leaf became a stem, and the stem grew taller and taller.", "It grew every day, first as high as a mouse, then as high as {N}.")
    t.say("By the end of summer, it was [a beautiful|the biggest] {plant}, and everyone came to see it.", "In the summer, everybody could see what it was: a {plant}, [strong and bright|the finest for miles around]!")
    t.para()
    t.say("{N} shared it with [everyone|all the neighbours], and {he} kept one small seed for the next year.", "\"You see?\" said {e}. \"You were patient, and now it gives something back.\"", "{N} and {F} sat in front of it every evening, and {e} often came and sat with them.")


def plot_night(t):
    """Something strange in the night turns out to be harmless."""
    sign, source, reason = pick(t.rng, [
        ("a strange noise", "an old gate that moved in the wind", "Somebody had forgotten to close it"),
        ("a small light", "a hundred fireflies that were dancing in the air", "They come only on warm nights"),
        ("a sad song", "a lonely traveller with a flute", "He was far from home and missed his family"),
        ("a tapping sound", "a woodpecker that could not sleep", "It was building a new home"),
        ("a big shadow", "a coat that was hanging on a line", "Somebody had forgotten to bring it in"),
        ("a soft knocking", "a small hedgehog that was looking for food", "It was only hungry")])
    t.facts.update(problem="there was {sign} in the night", solved="{N} and {F} went to look, and it was only {source}", helper="{F}", object="a lantern", theme="a mystery")
    t.env["lesson"] = pick(t.rng, ["most monsters are small when you look at them with a light", "it is better to look than to be afraid", "every mystery has a simple answer somewhere"])
    t.env.update(sign=sign, source=source, reason=reason)
    t.para()
    t.say("One night, {N} could not sleep. From {s1} came {sign}.", "One dark night, {N} woke up. There was {sign} near {s1}.", "It began on a dark night. There was {sign} near {s1}, and nobody knew what it was.")
    t.say("\"What can it be?\" {he} [whispered|thought]. {He} pulled the blanket up to {his} nose.", "{N} listened. {His} heart was beating fast. \"Is it a monster?\" {he} thought.", "The next night it was there again, and the night after that too.")
    t.say("In the morning, {he} told everyone about it. \"It is a ghost,\" said some. \"It is a dream,\" said others.", "{He} told {F} about it in the morning. \"I have seen it too,\" said {F}, and {fhis} eyes were [big|round].")
    t.say("\"There is only one way to find out,\" said {F}. \"Tonight we will go and look.\"", "\"Let us go there tonight,\" said {N}. \"With you I am not afraid. Not very much, at least.\"")
    t.para()
    t.say("When the moon came up, they took a lantern and went to {s1}, very quietly.", "That night, they [tiptoed|walked softly] past {s2}. The lantern made long shadows.")
    t.say("There it was again! {N} held on to {F}. They [wanted to run|stood as still as two stones].", "\"Do you [hear|see] it?\" whispered {N}. \"Yes,\" whispered {F}. \"It comes from behind that wall.\"")
    t.say("{N} took a deep breath, lifted the lantern and looked. It was only {source}!", "Step by step they came closer. Then {N} began to laugh. It was {source}!")
    t.say("{reason}.", "\"So that is our monster,\" said {F}. {reason}.")
    t.para()
    t.say("They laughed all the way home.", "\"And we were so afraid!\" said {N}, and they laughed until the lantern shook.")
    t.say("In the morning, they told the others, and that night everyone [slept well|could sleep again].", "After that, {N} slept like a stone, and when {he} heard something at night, {he} [only smiled|took {his} lantern and went to look].")


def plot_treasure(t):
    """A map leads to a treasure that is not gold."""
    found, why = pick(t.rng, [
        ("a box with a hundred coloured stones", "A child had collected them many years before"),
        ("an old box full of letters", "They had been written by a sailor to his daughter, a long time ago"),
        ("a small bench with a wide view over everything", "It was the most beautiful place they had ever seen"),
        ("a little garden that everyone had forgotten", "There were roses and ripe strawberries in it"),
        ("a box of seeds and a note that said: plant me", "They planted them the same day")])
    t.facts.update(problem="{N} found an old map", solved="{N} and {F} followed the map and found {found}", helper="{F}", object="an old map", theme="a treasure")
    t.env["lesson"] = pick(t.rng, ["the best treasure is the way you walk together", "not all treasure is made of gold", "some treasures grow when you share them"])
    t.env.update(found=found, why=why)
    t.para()
    t.say("<day>, {N} found an old map [in a bottle|in a dusty book|behind a loose stone] near {s1}.", "<day>, {e} gave {N} an old map. \"I am too old to follow it,\" {ehe} said. \"But you are not.\"")
    t.say("There was a red cross on it, and a line that went past {s2} to {s3}.", "It showed {s2}, {s3} and a big red cross.")
    t.say("\"A treasure!\" <cried> {N}, and {he} ran to tell {F}.", "{N} showed the map to {F}. \"We must go there at once,\" said {F}.")
    t.say("They packed some {food}, a rope and a [lantern|small shovel], and off they went.", "\"Maybe it is gold,\" said {F}. \"Maybe it is a crown,\" said {N}. They talked about it all the way.")
    t.para()
    t.say("The way was long. First they walked to {s2}, and from there they counted a hundred steps.", "At {s2}, the path became narrow, and they had to [climb over a fallen tree|go one behind the other].")
    t.say("Once they [lost the path|took the wrong turn], but {N} turned the map around, and then they knew where they were.", "{F} was tired, so they rested and shared the {food}.", "It began to rain, and they waited under a tree and told each other [jokes|riddles].")
    t.say("Near {s3}, they found a stone with a cross on it. \"Here!\" <cried> {F}.", "<at last>, they came to {s3}. \"It must be here,\" said {N}.")
    t.say("They [dug|looked] and [dug|searched], and then they found {found}.", "Behind the stone was no gold and no crown. There was {found}.")
    t.para()
    t.say("{why}.", "At first they were [surprised|a little disappointed]. But then they looked again. {why}.")
    t.say("\"It is better than gold,\" said {N}.", "\"Nobody else has a treasure like this,\" said {F}.", "They decided to keep the secret, and to come back [every spring|every week].")


def plot_birthday(t):
    """Everyone seems to have forgotten the birthday."""
    t.facts.update(problem="{N} thought that everyone had forgotten {his} birthday", solved="{F} and the others had planned a surprise", helper="{F}", object="a {thing}", theme="a birthday")
    t.env["lesson"] = pick(t.rng, ["friends sometimes keep quiet because they love you", "it is good to be patient before you are sad", "the best present is to be remembered"])
    t.para()
    t.say("It was the birthday of {N}. {He} woke up early and [jumped|hopped] out of bed.", "<day>, it was {N}'s birthday. {He} could hardly wait to see {his} friends.")
    t.say("But when {he} met {e} near {s1}, {e} only said \"Good morning\" and walked on.", "{He} went to {s1}, but nobody was there. Nobody said \"Happy birthday\".")
    t.say("{He} met {F} near {s2}. \"Do you know what day it is today?\" asked {N}. \"Yes,\" said {F}. \"It is a [Tuesday|Friday|Monday]. I have to go.\"", "{F} was in a hurry too. \"I have no time today,\" said {F}, and ran away with a big basket.")
    t.say("{N} felt <sad>. \"They have all forgotten,\" {he} thought.", "{N} sat down near {s2} and [looked at the ground|sighed]. It was the loneliest birthday of all.")
    t.maybe(0.35, "{He} tried {like}, but it was no fun.", "{He} walked around all afternoon, [kicking a little stone|talking to nobody].")
    t.para()
    t.say("In the evening, {he} went home. It was dark inside. {He} opened the door.", "When the sun went down, somebody called from {s3}. {N} went to look. It was very quiet there.")
    t.say("\"Surprise!\" <cried> a dozen voices. There were lights everywhere, and a table with {food}.", "Suddenly there were lights, and music, and everybody jumped out. \"Happy birthday, {N}!\"")
    t.say("\"We did not forget,\" said {F}. \"We were [baking|getting everything ready] all day.\"", "\"Did you really think that we had forgotten?\" asked {F} with a grin.")
    t.say("{F} gave {him} a {thing}. It was just what {he} had wished for.", "There was a present from everyone, and the best one was a {thing} from {F}.")
    t.say("They [sang|danced] and ate until late in the night.", "<laugh>")


def plot_honest(t):
    """Something is broken, hidden, and in the end confessed."""
    broken = pick(t.rng, ["blue vase", "big window", "wooden clock", "best cup", "garden gate", "old lamp"])
    t.facts.update(problem="{N} broke the {broken} of {e}", solved="{N} told the truth and helped to repair it", helper="{F}", object="the {broken}", theme="honesty")
    t.env["lesson"] = pick(t.rng, ["the truth is lighter than a secret", "telling the truth is hard for a minute, and hiding it is hard for a week", "a mistake is not the end of a friendship"])
    t.env["broken"] = broken
    t.para()
    t.say("<day>, {N} was playing with a ball near {s1}. {He} threw it too high, and crash! The {broken} of {e} was broken.", "<day>, {N} was running too fast near {s1}. There was a loud crash. The {broken} of {e} lay on the ground in two pieces.")
    t.say("Nobody had seen it. {N} looked around and ran away.", "{N} was frightened. {He} hid behind a wall and said nothing.")
    t.say("In the afternoon, {e} asked, \"Who has broken my {broken}?\" {N} said nothing, and {his} face was hot.", "\"I wonder how that happened,\" said {e}. \"Maybe it was the wind,\" said {N} in a small voice.")
    t.say("That night, {he} could not sleep. The secret was as heavy as a stone.", "{He} could not eat and {he} could not play. {He} thought only of the {broken}.")
    t.para()
    t.say("The next day, {he} told {F} about it. \"What shall I do?\" asked {N}.", "\"You look as if you had swallowed a stone,\" said {F}. So {N} told {fhim} everything.")
    t.say("\"I think you know what to do,\" said {F}. \"I will go with you, if you like.\"", "\"Tell the truth,\" said {F}. \"It will be bad for a minute, and then it will be good.\"")
    t.say("They went to {e} together. {N} took a deep breath. \"It was me,\" {he} said. \"I broke your {broken}, and I am sorry.\"", "{N} knocked on the door of {e}. {His} voice was shaking. \"I broke it,\" {he} said. \"I was afraid to tell you.\"")
    t.say("{E} was quiet for a while. Then {ehe} smiled. \"I am glad that you told me,\" {ehe} said. \"That was harder than breaking a {broken}.\"", "{E} was not angry. \"A {broken} can be repaired,\" {ehe} said. \"Trust is much harder to repair. Thank you for telling me.\"")
    t.para()
    t.say("Together they repaired the {broken}. It was not as [pretty|smooth] as before, but {e} liked it even better.", "{N} helped {e} every afternoon for a week, until the {broken} was as good as new.")
    t.say("{N} felt as light as a feather.", "After that, {N} slept [well|like a stone] again.")


def plot_errand(t):
    """Something must be carried to someone, with obstacles."""
    load = pick(t.rng, ["a letter", "a pot of soup", "a basket of " + t.env["food"], "a warm blanket", "a small box", "some medicine"])
    t.facts.update(problem="{N} had to bring {load} to {e}", solved="{he} did not give up, and {F} showed {him} the way", helper="{F}", object="{load}", theme="a long walk")
    t.env["lesson"] = pick(t.rng, ["a promise gives you strong legs", "you only need to see the next step, not the whole road", "small feet can walk a long way"])
    t.env.update(load=load, it=re.sub(r"^(a|some) ", "the ", load))
    t.para()
    t.say("<day>, {parent} said, \"{E} is ill. Can you bring {ehim} {load}?\"", "<day>, {parent} gave {N} {load}. \"Please bring it to {e},\" said {parent}. \"{Ehe} lives near {s3}.\"")
    t.say("\"I can do that,\" said {N}. {He} had never gone so far alone, and {he} was a little proud.", "{N} promised to be careful and set off at once.")
    t.say("First {he} came to {s1}. <weather>", "The path went past {s1}. {N} [sang|counted {his} steps] to make the way shorter.")
    t.say("There, some [children|young animals] were playing. \"Come and play with us!\" they called. {N} wanted to, but {he} shook {his} head. \"Later,\" {he} said. \"I have made a promise.\"" if not t.animal else "There, some young animals were playing. \"Come and play with us!\" they called. {N} wanted to, but {he} shook {his} head. \"Later,\" {he} said. \"I have made a promise.\"", "Then it began to rain. {N} put {it} under {his} coat and walked on." if not t.animal else "Then it began to rain. {N} covered {it} with a big leaf and walked on.")
    t.para()
    t.say("At {s2}, the path was gone. [Water was everywhere.|A big tree had fallen across it.|There was only mud.] {N} did not know what to do.", "Near {s2}, the path split in two. {N} did not know which way to go.")
    t.say("\"Where are you going?\" asked a voice. It was {friend}.", "Then {friend} came by. \"Are you lost?\" asked {F}.")
    t.say("\"I have to bring {load} to {e},\" said {N}, \"but I cannot find the way.\"", "{N} told {F} about {it}.")
    t.say("\"I know another way,\" said {F}. \"Follow me.\"", "<help>")
    t.say("They went [around the big rock|over a small hill|through the tall grass], and there it was, the [house|home] of {e}.", "{F} went ahead and {N} followed. Before it was dark, they were there.")
    t.para()
    t.say("\"You came all this way for me?\" said {e}. \"Come in and [get warm|sit down].\"", "When {e} saw {it}, {ehe} smiled for the first time in days.")
    t.say("The three of them sat together and [drank tea|told stories] until {e} felt much better.", "\"Now I feel better already,\" said {e}. \"It is not only {it}. It is that you came.\"")


def plot_learn(t):
    """A skill is learned by practice."""
    skill, place, first, later = pick(t.rng, [
        ("play the flute", "at the summer feast", "it sounded like an angry cat", "the birds stopped to listen"),
        ("bake bread", "for the whole village", "the bread was as black as coal", "the bread was golden and warm"),
        ("swim", "across {water}", "{he} swallowed half of the water", "{he} moved through the water like a fish"),
        ("paint", "on the big white wall", "the horse looked like a potato", "everyone could see that it was a horse"),
        ("juggle", "at the market", "all the balls rolled away", "five balls danced in the air"),
        ("sing", "in the choir", "the dogs began to howl", "even {e} had to wipe away a tear")])
    t.facts.update(problem="{N} wanted to learn to {skill}", solved="{he} practised every day, and {e} taught {him}", helper="{e}", object="a lot of practice", theme="learning to {skill}")
    t.env["lesson"] = pick(t.rng, ["every master was a beginner once", "practice is a road that everyone can walk", "you have to do a thing badly before you can do it well"])
    for key, value in (("skill", skill), ("occasion", place), ("first", first), ("later", later)):
        t.env[key] = expand(value, t.env, t.rng, sentence=False)
    t.para()
    t.say("More than anything, {N} wanted to learn to {skill}.", "<day>, {N} saw how well {e} could {skill}. \"I want to do that too!\" {he} said.")
    t.say("{He} tried it at once, but {first}.", "The first time was terrible: {first}.")
    t.say("{F} tried not to laugh. \"It was very loud,\" {fhe} said politely." if skill in ("play the flute", "sing") else "{F} tried not to laugh. \"Well, it is a beginning,\" {fhe} said politely.", "{N} was [ashamed|disappointed]. \"I will never learn it,\" {he} said.")
    t.say("{He} went to {e}. \"Can you teach me to {skill}?\" {he} asked.", "{E} had seen everything. \"Come to me tomorrow,\" {ehe} said.")
    t.say("<elder says>", advice=pick(t.rng, ["I also began like that", "Do it a little every day, and do not hurry", "First slowly, then better, then faster", "Nobody is born with it"]))
    t.para()
    t.say("So {N} practised. {He} practised in the morning near {s1} and in the evening near {s2}.", "Every day, {he} went to {e} and practised for an hour.")
    t.say("Some days were good and some days were bad. On the bad days, {F} [sat beside {him}|brought {him} some {food}] and said, \"Once more.\"", "In the first week nothing changed. In the second week it was a little better.")
    t.maybe(0.35, "Once {he} wanted to give up. But then {he} thought of {e}, and {he} tried it one more time.", "Slowly, very slowly, it became easier.")
    t.para()
    t.say("Then the great day came. {N} was going to {skill} {occasion}.", "In the autumn, {e} said, \"Now you are ready.\" And {N} was allowed to {skill} {occasion}.")
    t.say("{His} knees were shaking, but {he} began, and {later}.", "{N} took a deep breath and began. This time, {later}.")
    t.say("Everybody clapped, and {F} clapped the loudest.", "{E} nodded and said only one word: \"Good.\" It was the best word {N} had ever heard.")


def plot_newcomer(t):
    """Somebody new arrives and finds a friend."""
    t.facts.update(problem="{F} was new and had no friends", solved="{N} went to {fhim} and asked {fhim} to play", helper="{N}", object="a {thing}", theme="a new friend")
    t.env["lesson"] = pick(t.rng, ["every friend was a stranger once", "a friendly word costs nothing", "somebody has to say hello first"])
    t.para()
    t.say("<day>, somebody new came to live near {s1}. It was a [shy|quiet] {fkind} named {F}.", "<day>, a new family moved into the house near {s1}, and with them came a {fkind} named {F}.")
    t.say("{F} did not know anybody and always sat alone near {s2}.", "The others played their games, and nobody asked {F} to join in.")
    t.say("\"{Fhe} does not like us,\" said some of the others. But {N} was not so sure.", "{N} watched {fhim} for a while. \"{Fhe} looks lonely,\" {he} thought.")
    t.say("<so> {he} took {his} {thing} and went to {s2}.", "The next day, {N} put some {food} in a basket and went over to {fhim}.")
    t.para()
    t.say("\"Hello,\" said {N}. \"My name is {N}. What is your name?\" \"I am {F},\" said the {fkind} in a very small voice.",
          "\"May I sit here?\" asked {N}. {F} looked up, surprised. \"Yes,\" {fhe} said. \"I am {F}.\"")
    t.say("\"Do you like {like}?\" asked {N}. The eyes of {F} began to shine. \"I love it!\" {fhe} said.", "\"Where did you live before?\" asked {N}. And {F} told {him} about a land far away, where everything was different.")
    t.say("They talked and talked, and soon they were laughing.", "{F} knew a game that nobody here had ever played. It was so funny that {N} fell over laughing.")
    t.para()
    t.say("The next day, {N} took {F} along to the others. \"This is my friend {F},\" {he} said, \"and {fhe} knows the best game in the world.\"", "Soon the others came closer, one after the other. \"Can we play too?\" they asked.")
    t.say("By the evening, {F} had not one friend but seven.", "After that, {F} never sat alone again.")
    t.say("\"Thank you for saying hello,\" said {F}.", "<laugh>")


def plot_star(t):
    """A wish on a star."""
    t.facts.update(problem="{N} saw a falling star and did not know what to wish for", solved="{he} gave {his} wish to {e}", helper="{F}", object="a falling star", theme="a wish")
    t.env["lesson"] = pick(t.rng, ["a wish for somebody else is the best kind of wish", "you can be rich without having more", "the nicest wishes are the ones you can make true yourself"])
    t.para()
    t.say("One clear night, {N} was sitting near {s1} when a star fell from the sky.", "One night, {N} and {F} were looking at the stars near {s1}. Suddenly one of them fell.")
    t.say("It [landed|came down] near {s2}, as soft as a feather, and it was still shining.", "It fell slowly, like a leaf, and [landed|came to rest] near {s2}.")
    t.say("\"You have found me,\" said the star in a thin, clear voice. \"So you have one wish.\"", "{N} ran there and picked it up. It was warm. \"You may make one wish,\" said the star.")
    t.say("{N} thought about a {thing}. Then {he} thought about a mountain of {food}. It was so hard to choose!", "\"I wish for,\" {he} began, and then {he} stopped. What did {he} really want?")
    t.say("\"Take your time,\" said the star. \"But when the sun comes up, I must be back in the sky.\"", "\"What would you wish for?\" {he} asked {F}. \"I do not know,\" said {F}. \"I think I have everything.\"")
    t.para()
    t.say("Then {N} thought of {e}, who had been ill for a long time.", "Then {N} remembered {e}, who was so often alone.")
    t.say("\"I wish that {e} is well and happy again,\" {he} said.", "\"I know it now,\" said {N}. \"I wish that {e} can laugh again.\"")
    t.say("\"That is a good wish,\" said the star. It [shone|glowed] brighter and brighter, and rose up into the sky.", "The star laughed like a little bell, and then it was gone.")
    t.para()
    t.say("In the morning, {e} was standing at {s3}, [singing|dancing] like a young bird. \"I do not know what happened,\" {ehe} said, \"but I feel wonderful!\"", "The next morning, {N} heard somebody laughing near {s3}. It was {e}!")
    t.say("{N} only smiled and said nothing.", "{N} looked up at the sky and [winked|waved].", "{F} looked at {N}, and {N} looked at {F}, and they kept the secret.")


def plot_lamp(t):
    """The light must burn, and somebody must bring it (told by the sea)."""
    t.facts.update(problem="the lamp in the lighthouse went out", solved="{N} and {F} carried a lantern up the stairs and lit the lamp again", helper="{F}", object="a lantern", theme="a lighthouse")
    t.env["lesson"] = pick(t.rng, ["even a small light can be seen from far away", "one small deed can save many", "you do not have to be big to do something big"])
    t.para()
    t.say("On a hill above the water stood an old lighthouse. Every night, its lamp showed the boats the way home.", "There was an old lighthouse on the cliff, and {N} loved its warm light more than anything.")
    t.say("One evening, a thick fog came in from the sea, and the lamp went out.", "But one stormy evening, the lamp did not shine. Everything was dark.")
    t.say("\"The boats are still out there!\" <cried> {N}. \"They will not find the way.\"", "{N} thought of the boats, and of all the people who were waiting for them.")
    t.say("{He} ran to {F}. \"The lamp is out! We must do something.\"", "{F} had seen it too. They met at {s2}, both out of breath.")
    t.say("They took a lantern and [ran|climbed] up the path to the lighthouse. The wind was so strong that they had to hold on to each other.", "\"Take the lantern,\" said {F}, \"and I will take the oil.\" Together they ran up the hill.")
    t.para()
    t.say("At the door sat the keeper. He had hurt his leg on the stairs. \"Ninety steps,\" he said. \"I cannot climb them. Can you?\"", "The old keeper was ill in bed. \"The oil,\" he said in a weak voice. \"Somebody must bring the oil to the top.\"")
    t.say("{N} looked up. The stairs went round and round into the dark. {He} was afraid, but {he} nodded.", "\"We can,\" said {N}, and they began to climb, step by step by step.")
    t.say("At the top, {N} poured in the oil with care, and {F} held the lantern close. For a moment nothing happened.", "Twice the wind blew out the flame. The third time, {N} [stood in front of it|held up {his} coat], and it burned." if not t.animal else "Twice the wind blew out the flame. The third time, {N} stood in front of it, and it burned.")
    t.say("Then the big lamp was burning again, and its light went far out over the water.", "Then the light came back, bright and golden, and it swept over the sea.")
    t.para()
    t.say("One after the other, the boats came home. {N} counted them: one, two, three, four. All of them were safe.", "Out in the fog, a bell rang, and then another. The boats had seen the light, and they came home.")
    t.say("\"Who lit the lamp?\" asked the sailors. The keeper smiled. \"Two small friends with big hearts,\" he said.", "The next day, everyone in the village came to thank {N} and {F}.")


PLOTS = {
    "a treasure": plot_treasure, "a lost thing": plot_lost, "a storm": plot_storm, "building something": plot_build, "a lost animal": plot_baby,
    "a mystery": plot_night, "friendship": plot_quarrel, "being brave": plot_fear, "sharing": plot_share, "a garden": plot_garden,
    "a birthday": plot_birthday, "honesty": plot_honest, "a race": plot_race, "a long walk": plot_errand, "learning": plot_learn,
    "a new friend": plot_newcomer, "a wish": plot_star, "a lighthouse": plot_lamp,
}


def story(rng, plot=None, brief=False, **wishes):
    """A whole story; returns the finished Tale. Some stories have a second part with the same characters."""
    if plot == "a lighthouse":
        wishes["setting"] = "sea"
    t = Tale(rng, brief=brief, **wishes)
    usable = [p for p in PLOTS if p != "a lighthouse" or t.setting == "sea"]
    if plot is None:
        plot = "a lighthouse" if t.setting == "sea" and rng.random() < 0.25 else pick(rng, usable)
    meets_friend = plot in ("a lost thing", "a lost animal", "building something", "a long walk")
    opening(t, introduce_friend=rng.random() < 0.5 if meets_friend else plot not in ("a new friend", "sharing"))
    PLOTS[plot](t)
    if not brief and rng.random() < 0.12:
        t.para()
        t.say("But that was not the end of the story.", "And that was only the beginning.", "A few weeks later, something else happened.")
        facts, t.env["friend"] = dict(t.facts), t.env["F"]
        PLOTS[rng.choice([p for p in PLOTS if p not in (plot, "a lighthouse", "a new friend")])](t)
        t.facts = facts
    t.maybe(0.75, "<moral>")
    t.maybe(0.9, "<close>")
    t.plot = plot
    t.answers = {key: expand(value, t.env, rng, sentence=False) for key, value in t.facts.items()}
    return t
