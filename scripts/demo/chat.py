"""Chat turns and short explanations for the built-in demo model: what it can say about tinyvllm and about itself.

Like the stories of `corpus`, every sentence here was written for tinyvllm. `document(rng)` returns one training
document: a story, a conversation in the chat format, or a few paragraphs of plain prose.
"""

import random

from corpus import BOYS, GIRLS, JUNGLE_ANIMALS, PLOTS, SETTINGS, THINGS, COLOURS, expand, made_up_name, pick, story

BOS, EOS, SYSTEM, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, SYSTEM, USER, ASSISTANT, END]

# --------------------------------------------------------------------------------------------------------------
# Concepts: name(s), one-sentence definitions, further sentences, the reason it exists
# --------------------------------------------------------------------------------------------------------------

CONCEPTS = [
    (["tinyvllm", "this program", "this engine"],
     ["tinyvllm is a small language model engine written in Rust.", "tinyvllm is a program that runs language models on your own computer.", "tinyvllm is an inference engine for language models in one small Rust binary."],
     ["It runs on a CPU, on an Apple GPU and on an NVIDIA GPU.", "It keeps the cache in pages, it batches requests all the time, and it shares common prefixes.", "It reads GGUF files and Hugging Face folders.", "It is built on the candle library."],
     ["It is made for people who want to run models on their own machine.", "It is small, so that you can read all of it."]),
    (["a KV cache", "the KV cache", "the key value cache", "a kv cache"],
     ["The KV cache keeps the keys and values of all tokens that the model has already seen.", "A KV cache is the memory of the attention: it holds the keys and values of every earlier token.", "The KV cache stores what attention needs from earlier tokens, layer by layer."],
     ["With it, each new token needs only one step of work instead of reading everything again.", "It grows by a little with every token.", "In tinyvllm it is divided into blocks of equal size."],
     ["Without it, the model would have to compute the whole text again for every new token.", "It makes decoding fast, but it needs memory."]),
    (["paged attention", "PagedAttention", "a paged KV cache"],
     ["Paged attention keeps the KV cache in small blocks, like the pages of a book.", "With paged attention, the KV cache of a sequence is split into blocks that can lie anywhere in memory.", "Paged attention reads keys and values through a block table, so that the cache need not be in one piece."],
     ["A block table says where each block of a sequence is.", "Blocks are taken when they are needed and given back when the sequence is finished.", "Two sequences can share a block when they begin with the same text."],
     ["Almost no memory is wasted in this way, so more requests fit at the same time.", "It is used because nobody knows in advance how long an answer will be."]),
    (["continuous batching", "batching"],
     ["Continuous batching means that requests join and leave the batch at every step.", "With continuous batching, a new request does not wait until the others are finished.", "Continuous batching runs many requests together and changes the batch at each step."],
     ["When one sequence is finished, its place is free at once.", "The scheduler decides in each step which sequences run.", "Every step has a token budget that the sequences share."],
     ["It keeps the machine busy, because the weights are read once for the whole batch.", "It gives more tokens per second when many people ask at the same time."]),
    (["prefix caching", "the prefix cache", "prefix sharing"],
     ["Prefix caching reuses the KV cache of text that was already computed.", "The prefix cache finds blocks again that belong to the same beginning of a text.", "With prefix caching, two prompts with the same beginning share their blocks."],
     ["Each full block has a hash that depends on all the tokens before it.", "A hit also compares the tokens, so a wrong block is never used.", "A system prompt, for example, is computed only once."],
     ["It makes the first token of an answer come sooner.", "It saves both time and memory."]),
    (["quantisation", "quantization", "a quantised model", "Q4_0", "Q8_0"],
     ["Quantisation stores the weights of a model with fewer bits.", "A quantised model keeps its weights as small whole numbers with a scale for each block.", "Quantisation makes a model smaller by rounding its weights in blocks."],
     ["Q8_0 uses about eight bits for a weight, and Q4_0 uses about four.", "The model becomes smaller and faster, and only a little less exact.", "GGUF files usually hold quantised weights."],
     ["It is used because reading the weights from memory takes most of the time.", "With it, a big model fits on a small machine."]),
    (["chunked prefill", "prefill"],
     ["Chunked prefill computes a long prompt in pieces.", "With chunked prefill, a long prompt is cut into chunks that fit into the token budget of a step.", "Prefill is the work on the prompt, and chunked prefill does it piece by piece."],
     ["The other sequences go on with their answers in the same step.", "The result is the same as if the prompt were computed at once."],
     ["Without it, one long prompt would stop everybody else.", "It keeps the answers of the others flowing."]),
    (["preemption", "a preempted request"],
     ["Preemption takes the blocks of one sequence back when memory is short.", "When no block is free, the scheduler preempts the sequence that came last.", "A preempted request gives its blocks back and waits for its turn."],
     ["Later it is computed again, and its output is the same as before.", "Often its blocks are still in the prefix cache, so little work is lost."],
     ["It means that a full cache never stops the older requests.", "It lets the engine use all of its memory without fear."]),
    (["a token", "tokens", "a tokenizer"],
     ["A token is a small piece of text: a word, a part of a word, or a sign.", "A model does not read letters. It reads tokens, which are pieces of words.", "A tokenizer cuts text into tokens and gives each of them a number."],
     ["The word \"the\" is one token, and a rare word can be three or four.", "The model writes one token after the other.", "My own tokenizer knows about two thousand tokens."],
     ["Tokens are used because numbers are easier for a model than letters.", "Common words become short in this way."]),
    (["the scheduler", "a scheduler"],
     ["The scheduler decides which sequences run in the next step.", "The scheduler shares the token budget of a step among the sequences."],
     ["Running sequences come first, and waiting ones come in when there is room.", "It does not know anything about text or about the GPU."],
     ["A good scheduler keeps the machine busy and lets nobody wait too long."]),
    (["a GGUF file", "GGUF", "the GGUF format"],
     ["GGUF is a file format for language models.", "A GGUF file holds the weights of a model, its tokenizer and its chat template in one file.", "GGUF is a format that keeps a whole model in a single file."],
     ["The weights in it are usually quantised.", "The file begins with a list of keys and values, and then come the tensors.", "I am such a file myself."],
     ["It is practical, because you need only one file to run a model."]),
    (["temperature", "the temperature"],
     ["The temperature says how much chance there is in the choice of the next token.", "Temperature changes how bold the model is when it chooses the next token."],
     ["With a temperature of 0, the model always takes the most likely token.", "A high temperature gives surprising text, and a low temperature gives careful text.", "You can set it with --temperature."],
     ["It is useful for stories, where you want a new one each time."]),
    (["greedy decoding", "greedy sampling"],
     ["Greedy decoding always takes the most likely token.", "With greedy decoding there is no chance: the best token wins each time."],
     ["The same prompt then gives the same answer.", "You get it with --temperature 0."],
     ["It is good for tests, because the output does not change."]),
    (["a chat template", "the chat template"],
     ["A chat template turns a conversation into the text that the model was trained on.", "The chat template says how the turns of a conversation are written for the model."],
     ["It marks who is speaking: the system, the user or the assistant.", "tinyvllm takes it from the model file and never guesses."],
     ["Without the right template, a model answers badly."]),
    (["attention", "self attention"],
     ["Attention lets each token look at all the tokens before it.", "In attention, every token asks which earlier tokens are important for it."],
     ["It uses queries, keys and values.", "The keys and values of earlier tokens are kept in the KV cache."],
     ["This is how a model can remember a name from the beginning of a story."]),
    (["decoding", "the decode step"],
     ["Decoding is the part in which the model writes its answer, one token at a time.", "In decoding, each step gives one new token for each sequence."],
     ["All the weights are read once for each step, so the speed of the memory is the limit.", "The new token is added to the sequence, and then the next step begins."],
     ["It is why a batch is so useful: one reading of the weights serves many sequences."]),
    (["a language model", "language models", "a large language model"],
     ["A language model is a program that has learned which word comes next.", "A language model reads some text and says what is likely to follow."],
     ["It learns from a lot of text.", "Large models have billions of parameters. I have only about seven million."],
     ["By doing this again and again, it can write whole answers."]),
    (["a block table", "block tables"],
     ["A block table lists the blocks of the KV cache that belong to a sequence.", "The block table of a sequence says where its keys and values are."],
     ["New blocks are added at the end as the sequence grows.", "It works like the table of contents of a book."],
     ["With it, the blocks of a sequence can be anywhere in memory."]),
    (["Rust", "the Rust language"],
     ["Rust is a programming language that is fast and safe.", "Rust is the language in which tinyvllm is written."],
     ["It finds many mistakes before the program runs.", "You build a Rust program with cargo."],
     ["It was chosen because it makes one small and fast program."]),
    (["a GPU", "GPUs"],
     ["A GPU is a processor that does many small calculations at the same time.", "A GPU is a chip that was made for pictures and is now used for language models too."],
     ["It has very fast memory, and that is what a language model needs.", "tinyvllm can use the GPU of a Mac and the GPUs of NVIDIA."],
     ["On a GPU, a model usually answers much faster than on a CPU."]),
]

# --------------------------------------------------------------------------------------------------------------
# Questions with fixed answers: how to use the program, the assistant itself, small talk
# --------------------------------------------------------------------------------------------------------------

FAQ = [
    (["How [do|can] I load [a|another|a different|a bigger] model?", "How [do|can] I [use|run|start] [another|a bigger|a better|a different] model?", "Which command loads a model?", "How do I choose the model?"],
     ["Start the program with --model and a name, for example: tinyvllm --model tinyllama", "Use the --model option: tinyvllm --model tinyllama [will load TinyLlama.|loads a much bigger model than me.]"]),
    (["How [do|can] I [use|load|run|open] a GGUF file?", "Can I use my own GGUF file?", "I have a GGUF file. What now?", "Can you load GGUF files?"],
     ["Give the path of the file to --model, for example: tinyvllm --model my-model.gguf", "Yes. Write tinyvllm --model and then the path of your GGUF file. The tokenizer and the chat template are taken from the same file."]),
    (["How [do|can] I see the help?", "Where [is|can I find] the help?", "Which options are there?", "What options do you have?", "Help!", "help"],
     ["Run tinyvllm --help to see all commands and options.", "You can see every option with: tinyvllm --help"]),
    (["How [do|can] I choose the device?", "How [do|can] I use [my|the] GPU?", "How do I run on the [GPU|CPU]?", "Which devices are there?", "Can you run on a [GPU|Mac|CPU]?", "Which devices are supported?"],
     ["Use --device with auto, cpu, metal or cuda, for example: tinyvllm --device cpu", "With --device you choose where the model runs: cpu, metal for a Mac, cuda for NVIDIA, or auto."]),
    (["How [do|can] I stop [an|the|this] answer?", "How do I [stop|interrupt] you?", "You talk too much. How do I stop it?", "Which key stops the answer?"],
     ["Press Ctrl-C to stop the answer. The chat goes on after that.", "Press Ctrl-C, and I will stop [at once|talking]."]),
    (["How [do|can] I [leave|quit|end|exit] [the chat|this program|here]?", "How do I get out of here?", "I want to [leave|quit]. What do I do?", "How do I quit?"],
     ["Type /quit to leave the chat.", "Write /quit and press Enter."]),
    (["How [do|can] I [start again|start over|clear the chat|begin a new conversation|make you forget everything]?", "What does /reset do?", "How do I reset the chat?"],
     ["Type /reset, and the conversation begins again.", "With /reset you start a new conversation. I will forget what was said before."]),
    (["What does /quit do?"], ["It ends the chat and leaves the program."]),
    (["How do I set the [length|maximum length] of the answer?", "How can I get [longer|shorter] answers?", "What does --max-tokens do?", "What is --max-tokens?"],
     ["Use --max-tokens with a number, for example: tinyvllm --max-tokens 200", "The option --max-tokens says how many tokens I may write at most."]),
    (["What does --prompt do?", "How [do|can] I give [you|it|the model] a prompt?", "How do I [run|try] a single prompt?"],
     ["With --prompt you give the text that the model should continue, for example: tinyvllm --prompt \"Once upon a time\"", "Write your text after --prompt, and the model will continue it."]),
    (["What does --temperature do?", "How [do|can] I set the temperature?", "How do I make the output [less random|more random|the same each time]?"],
     ["Use --temperature with a number. With --temperature 0 the output is the same each time, and with 1 it is more surprising.", "The option --temperature sets how much chance there is. A value of 0 means none at all."]),
    (["What does --device do?"], ["It chooses where the model runs: auto, cpu, metal or cuda."]),
    (["What does --model do?"], ["It chooses the model: a name such as tinyllama, or the path of a file or folder."]),
    (["How [do|can] I [start a chat|chat with a model|talk to a model]?", "What does tinyvllm chat do?", "What is tinyvllm chat?"],
     ["Run tinyvllm chat to start a conversation. Add --model to choose another model.", "The command is: tinyvllm chat"]),
    (["How [do|can] I measure the speed?", "How fast [are you|is it]?", "What does tinyvllm bench do?", "Is there a benchmark?", "How do I run a benchmark?"],
     ["Run tinyvllm bench. It measures how many tokens per second your machine can do.", "That depends on your machine. You can measure it with: tinyvllm bench"]),
    (["How [do|can] I download a model?", "What does tinyvllm pull do?", "How do I get [TinyLlama|a model]?"],
     ["Run tinyvllm pull and the name of the model, for example: tinyvllm pull tinyllama", "With tinyvllm pull tinyllama the model is downloaded once, and then it is ready to use."]),
    (["What does tinyvllm info do?", "How [do|can] I see [what is in a model file|facts about a model]?", "How do I inspect a model?"],
     ["It shows what is known about a model: its size, its layers and its types.", "Run tinyvllm info to see the facts about a model."]),
    (["How [do|can] I [build|compile|install] [tinyvllm|the program|it|this]?", "How do I run it from the source?", "What is cargo run?"],
     ["You need Rust. Then run: cargo run --release", "Run cargo run --release in the folder of the project. The first build takes a few minutes."]),
    (["Which models [can you run|are supported|can tinyvllm run|work]?", "What models does tinyvllm support?", "Can you run [Llama|Mistral|Qwen|TinyLlama]?"],
     ["tinyvllm runs models of the Llama family, such as TinyLlama, Llama, Mistral and Qwen.", "Models of the Llama family: TinyLlama, Llama, Mistral and Qwen, for example. Try tinyvllm --model tinyllama first."]),
    (["Do I need the internet?", "Does it work offline?", "Do you send my data [somewhere|to the internet]?", "Is my data safe?"],
     ["No internet is needed for me. I run on your machine, and your text stays there.", "Everything runs on your own machine. Only tinyvllm pull needs the internet, to download a model."]),
    (["Why is the first [answer|token] slow?", "Why does the first token take longer?"],
     ["Before the first token, the whole prompt must be computed. After that, each token needs only one small step."]),
    (["What do I do when memory is full?", "The model does not fit into memory. What can I do?", "I do not have enough memory."],
     ["Take a smaller model or one with fewer bits, such as Q4_0.", "Try a quantised model. A model in Q4_0 needs much less memory."]),
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?", "Are you [ChatGPT|a person|a human|a robot]?"],
     ["I am the demo model of tinyvllm, a very small language model [with about seven million parameters|that lives inside the program].", "I am a tiny demo model. I can tell little stories and answer simple questions about tinyvllm."]),
    (["Are you a [big|large|good|smart] model?", "Are you a [strong|real|proper] model?", "Are you [clever|intelligent|smart]?"],
     ["No, I am a tiny demo model with about seven million parameters. For real answers, try: tinyvllm --model tinyllama", "I am very small: about seven million parameters and eight layers. A bigger model knows much more. Try tinyvllm --model tinyllama"]),
    (["How many parameters do you have?", "How [big|large|small] are you?", "What is your size?", "How many weights do you have?"],
     ["I have about seven million parameters and eight layers. That is very small.", "About seven million parameters. Large models have billions."]),
    (["What is vLLM?", "What is the difference between tinyvllm and vLLM?", "Is this vLLM?", "How are you different from vLLM?", "What is vllm"],
     ["vLLM is a large engine for language models. tinyvllm takes its main ideas and puts them into one small Rust program.", "vLLM is a big project that made paged attention well known. tinyvllm is a small program with the same ideas."]),
    (["What can you do?", "What do you know?", "How can you help me?", "What can I ask you?", "What should I ask you?", "What are you good at?"],
     ["I can tell you a short story, answer questions about tinyvllm, and do very simple sums. Try: Tell me a story about a fox.", "I know little stories, some facts about tinyvllm, the days of the week and a few other simple things."]),
    (["What can you not do?", "What are your limits?", "Can I trust you?", "Are you always right?"],
     ["I am very small, so I make mistakes. Please do not trust me with anything important.", "I know nothing but little stories and a few facts about this program. For anything else, use a bigger model."]),
    (["Who made you?", "Who trained you?", "How were you [trained|made]?", "What were you trained on?", "Where do you come from?"],
     ["I was trained by a script of the tinyvllm project, on stories and questions that the script writes itself.", "The people who make tinyvllm trained me. My texts come from a small grammar of stories and questions."]),
    (["How many layers do you have?"], ["I have eight layers.", "Eight. That is very few. Large models have thirty or more."]),
    (["Why are you so small?"], ["I am built into the program, so I have to be small. In this way you can try tinyvllm without a download."]),
    (["How old are you?", "When were you born?"], ["I do not have an age. I am a small file of numbers.", "I am a model, so I have no birthday. But I know a story about one."]),
    (["Do you have feelings?", "Are you happy?", "Are you alive?", "Do you sleep?"], ["No, I am only a small program. But I like to tell happy stories.", "I do not feel anything. I am a small model that writes one word after the other."]),
    (["Do you like [music|stories|cats|dogs|books|cake]?", "What is your favourite [colour|animal|story|food]?"], ["I am a model, so I have no taste of my own. But I can tell you a story about it.", "I do not know what it is like. But I am good at stories."]),
    (["Do you understand [German|French|Spanish|Chinese|other languages]?", "Do you speak [German|French|Spanish|Japanese]?"], ["No, I only know simple English.", "I am sorry, I only speak English."]),
    (["Can you write [code|a program|Python|Rust]?", "Write me a [program|Python script|function]."], ["No, I am too small for that. A bigger model can do it. Try tinyvllm --model tinyllama", "I am sorry, I cannot write code. I only know stories and a few facts about tinyvllm."]),
    (["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Hello there!", "Good morning", "Good evening", "Hey, what's up?", "hello"],
     ["Hello! I am the small demo model of tinyvllm. What would you like to know?", "Hello! Shall I tell you a story, or do you have a question about tinyvllm?", "Hi! How can I help you?"]),
    (["How are you?", "How are you today?", "How is it going?", "Are you well?"], ["I am well, thank you. Would you like to hear a story?", "Thank you, I am fine. How can I help you?"]),
    (["Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Thank you very much.", "That was helpful.", "Great, thanks!"], ["You are welcome!", "You are welcome. Is there anything else?", "It was a pleasure."]),
    (["Bye", "Goodbye", "Good night", "See you later", "See you!", "I have to go now."], ["Goodbye! Type /quit to leave the chat.", "Goodbye, and have a nice day! You can leave with /quit."]),
    (["Yes", "Ok", "Okay", "Sure", "Good", "I see", "Nice", "Cool"], ["Good! What would you like to do next? I can tell a story or explain something about tinyvllm.", "Shall I tell you a story? Just say: Tell me a story."]),
    (["No", "No, thanks", "Not now", "Nothing"], ["That is fine. If you need me, I am here.", "All right. You can leave the chat with /quit."]),
    (["You are [stupid|bad|wrong]!", "That is wrong.", "That is not true.", "This makes no sense."], ["I am sorry. I am a very small model, and I make mistakes.", "You may be right. I am very small. A bigger model will do better: tinyvllm --model tinyllama"]),
    (["You are [great|funny|nice|good|cute]!", "I like you.", "Well done!", "Good job!"], ["Thank you! That is very kind of you.", "Thank you! I am small, but I do my best."]),
    (["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."],
     ["Why did the token cross the road? Because it was the most likely one.", "What did the cache say to the model? I will never forget you.", "Why was the little model so happy? It had no weight to lose."]),
    (["What is the meaning of life?"], ["I am too small for such a big question. But in my stories, it is often friendship."]),
    (["What time is it?", "What day is it today?", "What is the weather like?", "Is it raining?", "What is the date today?"],
     ["I do not know. I cannot see the world outside. I only know the text in this chat.", "I have no clock and no window, so I do not know."]),
    (["Can you see me?", "Can you hear me?", "Where am I?"], ["No, I can only read what you type."]),
    (["Do you remember me?", "Do you remember what I said yesterday?"], ["No. I only know what was said in this chat, and /reset makes me forget that too."]),
    (["Test", "test", "testing", "Is anybody there?", "Are you there?"], ["Yes, I am here. It works!", "I am here, and everything works. What would you like to know?"]),
]

UNKNOWN_TOPICS = """quantum physics|the stock market|the president|football|basketball|the moon landing|black holes|the Roman Empire|democracy|
DNA|vitamins|the human brain|opera|Shakespeare|dinosaurs|volcanoes|the speed of light|tax law|a good restaurant|the best phone|electric cars|
chess openings|the Second World War|philosophy|chemistry|the pyramids|gravity|photosynthesis|the economy|inflation|medicine|headaches|
the best movie|jazz|the Olympics|Mars|planes|bitcoin|politics|climate change|evolution|ancient Greece|the universe|robots|algebra|
cooking rice|a recipe for pizza|the news|the internet|Japan|Brazil|Africa|history|biology|poetry|a cover letter|my homework|
TypeScript|databases|Kubernetes|Linux|vacuum cleaners|insurance|the largest ocean|the tallest mountain|the longest river|Einstein|Mozart|
Napoleon|penicillin|magnets|earthquakes|the ozone layer|train tickets|a hotel in Rome|yoga|marathons|fashion|coffee machines""".replace("\n", "").split("|")

UNKNOWN_QUESTIONS = [
    "What is {topic}?", "Tell me about {topic}.", "Explain {topic}.", "What do you know about {topic}?", "Can you help me with {topic}?", "Who invented {topic}?",
    "What do you think about {topic}?", "How does {topic} work?", "I need information about {topic}.", "Give me advice about {topic}.", "Why is {topic} important?",
    "Write a poem about {topic}.", "Write an essay about {topic}.", "Translate {topic} into French.", "How much does {topic} cost?", "When did {topic} begin?",
    "Summarize {topic} for me.", "Who won {topic} last year?", "Where can I find {topic}?", "What is the history of {topic}?"]

MORE_UNKNOWN = """Why is the sky blue?|Can you sing?|What is the biggest number?|How far is the moon?|Why do we dream?|Who is the king of England?|What should I eat today?|
How do I learn to drive?|Which phone should I buy?|Is there life on Mars?|How do I become rich?|Why do cats purr?|What is love?|How tall is the Eiffel Tower?|Who wrote Hamlet?|
Can you draw a picture?|Can you book a flight?|Read my email.|What is the price of gold?|How many people live in China?|Who discovered America?|What is your opinion on war?|
Fix my code.|Why does my program crash?|What is 1000 divided by 7?|Solve this equation.|What is the square root of 2?|How do planes fly?|How do I cook an egg?|
Who is the best singer?|Should I buy a house?|What is the fastest car?|How long is a marathon?|Where do babies come from?|What happened in 1989?|Is coffee healthy?|
What is the best programming language?|How do I lose weight?|Play some music.|Set a timer.|What is in the news?|Who are my neighbours?|How many stars are there?|Why is water wet?|
What comes after death?|Can pigs fly?|Translate hello into German.|How do you say thank you in French?|Write a letter to my boss.|What is the plural of ox?|Spell restaurant.""".replace("\n", "").split("|")

UNKNOWN_ANSWERS = [
    "I am a very small model, and I do not know that. For such questions, try a bigger one: tinyvllm --model tinyllama",
    "I am sorry, I do not know anything about that. I can tell you a story, or explain how tinyvllm works.",
    "That is too hard for me. I only know little stories and a few facts about tinyvllm.",
    "I do not know. I am only a tiny demo model. A bigger model can help you: tinyvllm --model tinyllama",
]

# --------------------------------------------------------------------------------------------------------------
# Simple facts
# --------------------------------------------------------------------------------------------------------------

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
OPPOSITES = [("big", "small"), ("hot", "cold"), ("day", "night"), ("up", "down"), ("happy", "sad"), ("fast", "slow"), ("old", "young"), ("open", "closed"), ("light", "dark"),
             ("high", "low"), ("full", "empty"), ("wet", "dry"), ("loud", "quiet"), ("hard", "soft"), ("long", "short"), ("good", "bad"), ("left", "right"), ("early", "late"), ("rich", "poor"), ("strong", "weak")]
SOUNDS = [("cat", "meow"), ("dog", "woof"), ("cow", "moo"), ("duck", "quack"), ("sheep", "baa"), ("pig", "oink"), ("owl", "hoo"), ("mouse", "squeak"), ("bee", "buzz"), ("frog", "ribbit"), ("snake", "hiss"), ("lion", "roar"), ("crow", "caw"), ("hen", "cluck")]
YOUNG = [("cat", "kitten"), ("dog", "puppy"), ("cow", "calf"), ("duck", "duckling"), ("sheep", "lamb"), ("horse", "foal"), ("goat", "kid"), ("pig", "piglet"), ("hen", "chick"), ("frog", "tadpole"), ("bear", "cub"), ("deer", "fawn"), ("swan", "cygnet")]
COLOUR_OF = [("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("the sun", "yellow"), ("a banana", "yellow"), ("blood", "red"), ("a carrot", "orange"), ("coal", "black"), ("a strawberry", "red"), ("a lemon", "yellow"), ("milk", "white"), ("a leaf", "green"), ("the sea", "blue"), ("chocolate", "brown")]
LEGS = [("a dog", "four"), ("a cat", "four"), ("a bird", "two"), ("a spider", "eight"), ("an ant", "six"), ("a snake", "no"), ("a horse", "four"), ("a duck", "two"), ("a bee", "six"), ("a fish", "no"), ("a crab", "ten"), ("a cow", "four")]
SHAPES = [("a triangle", "three"), ("a square", "four"), ("a rectangle", "four"), ("a pentagon", "five"), ("a hexagon", "six")]
CAPITALS = [("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("England", "London"), ("Portugal", "Lisbon"), ("Greece", "Athens"), ("Austria", "Vienna"), ("Poland", "Warsaw"),
            ("Norway", "Oslo"), ("Sweden", "Stockholm"), ("Finland", "Helsinki"), ("Denmark", "Copenhagen"), ("Ireland", "Dublin"), ("Japan", "Tokyo"), ("China", "Beijing"), ("Egypt", "Cairo"), ("Russia", "Moscow"),
            ("Canada", "Ottawa"), ("Belgium", "Brussels"), ("Hungary", "Budapest"), ("Turkey", "Ankara"), ("Cuba", "Havana"), ("Kenya", "Nairobi"), ("Peru", "Lima"), ("Chile", "Santiago"), ("Iceland", "Reykjavik")]


def number(rng, n):
    return NUMBERS[n] if n <= 20 and rng.random() < 0.3 else str(n)


def sum_question(rng):
    """A small sum with its result, in digits or words."""
    kind = rng.random()
    if kind < 0.5:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        sign, word, result = "+", "plus", a + b
    elif kind < 0.75:
        a, b = sorted((rng.randint(0, 20), rng.randint(0, 20)), reverse=True)
        sign, word, result = "-", "minus", a - b
    else:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        sign, word, result = "*", "times", a * b
    if rng.random() < 0.6:
        ask = rng.choice([f"What is {a} {sign} {b}?", f"{a} {sign} {b}", f"{a} {sign} {b} = ?", f"{a}{sign}{b}", f"How much is {a} {sign} {b}?"])
        return ask, f"{a} {sign} {b} = {result}"
    left, right = number(rng, a), number(rng, b)
    return pick(rng, [f"What is {left} {word} {right}?", f"How much is {left} {word} {right}?", f"{left} {word} {right}"]), f"{a} {word} {b} is {result}."


def neighbour(rng, names, kind, unit):
    i, step = rng.randrange(len(names)), rng.choice([1, -1])
    word, other = ("after", names[(i + 1) % len(names)]) if step == 1 else ("before", names[i - 1])
    return f"[What|Which] {unit} [comes|is] {word} {names[i]}?", [f"{other} comes {word} {names[i]}.", f"The {unit} {word} {names[i]} is {other}."]


def fact_question(rng):
    """A question about a simple fact; returns (question template, answer templates)."""
    kind = rng.randrange(15)
    if kind == 0:
        return neighbour(rng, DAYS, "day", "day")
    if kind == 1:
        return neighbour(rng, MONTHS, "month", "month")
    if kind == 2:
        a, b = pick(rng, OPPOSITES)
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        return f"What is the opposite of {a}?", [f"The opposite of {a} is {b}.", f"{b}."]
    if kind == 3:
        a, b = pick(rng, SOUNDS)
        return f"[What sound does a {a} make?|What does a {a} say?|How does a {a} sound?]", [f"A {a} says {b}."]
    if kind == 4:
        a, b = pick(rng, YOUNG)
        return f"What is a [young|baby] {a} called?", [f"A young {a} is called a {b}."]
    if kind == 5:
        a, b = pick(rng, COLOUR_OF)
        return f"[What colour is {a}?|What color is {a}?|Which colour does {a} have?]", [f"{a[0].upper() + a[1:]} is {b}.", f"It is {b}."]
    if kind == 6:
        a, b = pick(rng, LEGS)
        return f"How many legs does {a} have?", [f"{a[0].upper() + a[1:]} has {b} legs."]
    if kind == 7:
        a, b = pick(rng, SHAPES)
        return f"How many [sides|corners] does {a} have?", [f"{a[0].upper() + a[1:]} has {b}."]
    if kind in (8, 9):
        a, b = pick(rng, CAPITALS)
        return f"[What is the capital of {a}?|Which city is the capital of {a}?|Tell me the capital of {a}.|The capital of {a} is]", [f"The capital of {a} is {b}."]
    if kind == 10:
        return "[What are the days of the week?|Name the days of the week.|Which days are there in a week?]", ["The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."]
    if kind == 11:
        return "[What are the seasons?|Name the four seasons.|Which seasons are there?]", ["The four seasons are spring, summer, autumn and winter."]
    if kind == 12:
        n = rng.randint(0, 99)
        return f"[What|Which] number comes after {n}?", [f"The number after {n} is {n + 1}."]
    if kind == 13:
        n = rng.randint(3, 12)
        return f"[Count to {n}.|Can you count to {n}?|Please count from 1 to {n}.]", [", ".join(str(i) for i in range(1, n + 1)) + "."]
    return pick(rng, [
        ("How many days are there in a week?", ["There are seven days in a week."]), ("How many months are there in a year?", ["There are twelve months in a year."]),
        ("How many hours are there in a day?", ["There are 24 hours in a day."]), ("How many minutes are there in an hour?", ["There are 60 minutes in an hour."]),
        ("Name some colours.", ["Red, blue, green, yellow, orange, purple, brown, black and white."]), ("Name some animals.", ["Cats, dogs, foxes, rabbits, bears, owls, ducks and frogs."]),
        ("How many days are there in a year?", ["There are 365 days in most years."]), ("Is the sun hot?", ["Yes, the sun is very hot."]), ("Is ice cold?", ["Yes, ice is cold."]),
        ("What do bees make?", ["Bees make honey."]), ("What do cows give us?", ["Cows give us milk."]), ("Where do fish live?", ["Fish live in the water."])])


# --------------------------------------------------------------------------------------------------------------
# Conversations
# --------------------------------------------------------------------------------------------------------------


def as_typed(rng, question):
    """People do not always type capitals and question marks."""
    roll = rng.random()
    if roll < 0.15:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.! ")
    if rng.random() < 0.04:
        question = rng.choice(["Please, ", "Hi, ", "Hey, ", "Ok, ", "So, "]) + question
    return question


PLURAL_NAMES = ("tokens", "language models", "block tables", "GPUs")


def concept_turn(rng):
    names, definitions, details, reasons = pick(rng, CONCEPTS)
    name = pick(rng, names)
    if rng.random() < 0.2:
        name = name.removeprefix("a ").removeprefix("the ")
    verb, does = ("are", "do") if name in PLURAL_NAMES else ("is", "does")
    kind = rng.random()
    if kind < 0.6:
        question = pick(rng, [f"What {verb} {name}?", f"Explain {name}.", f"What do you mean by {name}?", f"Can you explain {name}?", f"Tell me about {name}.", f"What does {name} mean?", f"{name}?", f"Please explain {name} to me.", f"Define {name}.", f"What {verb} {name}, in simple words?", f"Explain {name} like I am five.", f"I do not understand {name}.", f"What {verb} {name} in tinyvllm?"])
        parts = [pick(rng, definitions)]
        if rng.random() < 0.8:
            parts.append(pick(rng, details))
        if rng.random() < 0.4:
            parts.append(pick(rng, reasons))
    elif kind < 0.8:
        question = pick(rng, [f"Why {verb} {name} useful?", f"What {verb} {name} good for?", f"Why {does} {name} matter?"])
        parts = [pick(rng, reasons)]
        if rng.random() < 0.5:
            parts.append(pick(rng, details))
    else:
        question = pick(rng, [f"How {does} {name} work?", f"Tell me more about {name}.", f"Give me details about {name}."])
        parts = [pick(rng, definitions)] + rng.sample(details, min(2, len(details)))
    return question[0].upper() + question[1:], " ".join(parts)


def faq_turn(rng):
    questions, answers = pick(rng, FAQ) if rng.random() < 0.4 else rng.choice(FAQ)
    return expand(pick(rng, questions), {}, rng), expand(pick(rng, answers), {}, rng, sentence=False)


def fact_turn(rng):
    if rng.random() < 0.4:
        return sum_question(rng)
    question, answers = fact_question(rng)
    return expand(question, {}, rng), expand(pick(rng, answers), {}, rng)


def unknown_turn(rng):
    if rng.random() < 0.3:
        return rng.choice(MORE_UNKNOWN), pick(rng, UNKNOWN_ANSWERS)
    topic = rng.choice(UNKNOWN_TOPICS) if rng.random() < 0.8 else made_up_name(rng)
    return expand(rng.choice(UNKNOWN_QUESTIONS), {"topic": topic}, rng), pick(rng, UNKNOWN_ANSWERS)


STORY_SETTINGS = {"sea": "the sea", "hills": "the mountains", "forest": "a forest", "river": "a river", "farm": "a farm", "town": "a town", "snow": "the snow", "jungle": "the jungle", "kingdom": "a castle"}


def story_turn(rng):
    """A wish for a story, and the story; returns (question, answer, tale)."""
    kind = rng.random()
    wishes, about = {}, None
    if kind < 0.18:
        pass
    elif kind < 0.5:
        animals = sorted({a for s in SETTINGS.values() for a in s["animals"]} | set(JUNGLE_ANIMALS))
        species = pick(rng, animals) if rng.random() < 0.75 else rng.choice(["girl", "boy", "princess", "prince"] + OTHER_HEROES)
        wishes["species"] = species
        about = f"a [|brave |little |small |young ]{species}"
        if rng.random() < 0.3:
            known = GIRLS if species in ("girl", "princess") else BOYS if species in ("boy", "prince") else GIRLS + BOYS
            wishes["name"] = made_up_name(rng) if rng.random() < 0.5 else rng.choice(known)
            about = f"a [|little ]{species} [named|called] {wishes['name']}"
    elif kind < 0.6:
        wishes["name"] = made_up_name(rng) if rng.random() < 0.5 else rng.choice(GIRLS + BOYS)
        about = wishes["name"]
    elif kind < 0.72:
        wishes["thing"] = rng.choice(COLOURS) + " " + rng.choice(THINGS)
        wishes["plot"] = pick(rng, ["a lost thing", "friendship"])
        about = "a " + (wishes["thing"] if rng.random() < 0.6 else wishes["thing"].split()[1])
    elif kind < 0.84:
        wishes["setting"] = rng.choice(list(STORY_SETTINGS))
        about = STORY_SETTINGS[wishes["setting"]]
    else:
        wishes["plot"] = rng.choice([p for p in PLOTS if p != "a lost thing"])
        about = wishes["plot"]
    tale = story(rng, brief=rng.random() < 0.7, **wishes)
    if about is None:
        question = "[Tell me a story.|Tell me a story.|Can you tell me a story?|Tell me a [short|nice|little|funny] story.|I would like to hear a story.|Do you know a story?|Write a [short |]story.|A story, please.|Tell me a bedtime story.]"
    else:
        question = f"[Tell me a story about {about}.|Tell me a [short|little|nice] story about {about}.|Can you tell me a story about {about}?|Write a story about {about}.|Write a short story about {about}.|Do you know a story about {about}?|I want a story about {about}.|A story about {about}, please.|A story about {about}.]"
    return expand(question, {}, rng), tale.text(), tale


# Heroes that the settings do not have: people begin stories about them anyway.
OTHER_HEROES = ["dragon", "robot", "knight", "wizard", "fairy", "king", "queen", "pirate", "unicorn", "witch", "giant", "ghost", "elf", "monster", "dinosaur", "man", "woman"]

# Beginnings that no story of the grammar has. A story is a good answer to them as well.
OTHER_OPENINGS = [
    "[Once|Far, far away|Long, long ago|Long ago|Many years ago|In the old days|One day|One morning|One night|One evening|Yesterday|At midnight|Every night], [there was|there lived|there came|there stood] [a|an old|a young|a lonely|a strange] [{hero}|man|woman|house|castle|ship|city|road|shop]",
    "[A long time ago|Long ago|Once], in a [galaxy|land|country|kingdom|place] [far, far away|far away|beyond the mountains]",
    "In a [land|kingdom|country|world] [far, far away|where nobody was ever sad|that no map shows|full of magic|of ice and fire]",
    "It was [a dark and stormy night|a day like any other|the first day of winter|late at night|almost midnight|raining] [when|and|]",
    "It was the [best|worst|first|last|longest|coldest] [day|night|hour|time|summer|winter|year|of times] [of the year|of my life|of all|in the city|]",
    "The [old|little|young|last|brave|tired|lonely|quiet] [{hero}|man|woman|king|ship|train|house|captain|teacher|sailor] [walked|sat|looked|stood|was|had|came|opened|did not know]",
    "[He|She|I|We|They|Nobody] [opened the door|woke up|walked|looked up|had never seen|was alone|heard a noise|found a letter] [and|when|in the middle of the night|slowly|]",
    "[Deep|Far down|High up|Somewhere|Hidden] in the [woods|mountains|desert|ocean|city|clouds|sea]",
    "[There once was|There was once|There was|Once there was|There lived] [a|an old|a little] {hero}",
    "In the [beginning|middle of the forest|middle of the night|year 3000|deep blue sea|old house on the hill]",
    "When [I was a child|the sun came up|the moon rose|the clock struck twelve|the door opened|night fell|the ship arrived]",
    "The [door|letter|sun|moon|wind|sea|city|forest|road] [was|opened|rose|lay|had been]",
]

STORY_BEGINNING = "Once upon a time"


def opening_turn(rng):
    """The beginning of a story, as a first prompt often is, and a whole story; returns (question, answer, tale)."""
    kind = rng.random()
    wishes, classic = {}, kind < 0.55
    if rng.random() < 0.25:
        wishes["species"] = rng.choice(OTHER_HEROES)
    if rng.random() < 0.3:
        wishes["name"] = made_up_name(rng)
    brief = rng.random() < 0.7
    tale = story(rng, brief=brief, **wishes)
    while classic and not tale.text().startswith(STORY_BEGINNING):
        tale = story(rng, brief=brief, **wishes)
    text = tale.text()
    if kind < 0.25:
        opening = STORY_BEGINNING
    elif kind < 0.8:
        # Some words of the first paragraph, with which the answer begins again.
        words = text.split("\n")[0].split(" ")
        opening = " ".join(words[: rng.choice([1, 2, 3]) if rng.random() < 0.08 else rng.randint(4, min(len(words), 24))])
    else:
        opening = expand(rng.choice(OTHER_OPENINGS), {"hero": rng.choice(OTHER_HEROES)}, rng).strip()
    if rng.random() < 0.8:
        opening = opening.rstrip(".,:;")
    if rng.random() < 0.25:
        opening += rng.choice([",", "...", " ...", ".", " there was", " there lived"] if opening == STORY_BEGINNING else ["...", " ...", "."])
    if rng.random() < 0.06:
        opening = rng.choice(["Continue this story: ", "Finish the story: ", "Please continue: ", "Go on with this story: ", "Write a story that begins like this: "]) + opening
    return opening, text, tale


def after_story_turn(rng, tale):
    """A question about the story that was just told."""
    env = dict(tale.env)
    env.update(tale.answers)
    options = [
        ("[What was the name of the {kind}?|What was the {kind} called?]", ["The {kind} was called {N}.", "{His} name was {N}.", "The name of the {kind} was {N}."]),
        ("Who is the story about?", ["It is about {N}, a {trait} {kind}.", "The story is about a {kind} named {N}."]),
        ("Where did {N} live?", ["{N} lived {where}."]),
        ("What is the story about?", ["It is a story about {theme}."]),
        ("[How did it end?|How did the story end?|What happened in the end?]", ["In the end, {solved}."]),
        ("What happened in the story?", ["{problem}. In the end, {solved}."]),
        ("[What did {N} learn?|What is the moral of the story?|What can we learn from it?]", ["{N} learned that {lesson}."]),
        ("Who was {N}?", ["{N} was a {trait} {kind} who lived {where}."]),
    ]
    if env["helper"] == env["N"]:
        options.append(("Who helped {F}?", ["{N} helped {fhim}.", "It was {N} who helped {F}."]))
    else:
        options.append(("Who helped {N}?", ["{helper} helped {him}.", "It was {helper}."]))
    if tale.plot != "sharing":
        became = "{F} was a {fkind} and became a friend of {N}." if tale.plot == "a new friend" else "{F} was a {ftrait} {fkind}."
        options.append(("Who was {F}?", [became, "{F} was a friend of {N}."]))
    question, answers = rng.choice(options)
    return expand(question, env, rng), expand(pick(rng, answers), env, rng)


SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "You are the demo model of tinyvllm.", "You are a helpful, honest assistant.", "You tell little stories.",
    "You are a storyteller.", "Be kind and clear.", "You are tinyvllm.", "Answer the questions of the user.", "You help people to use tinyvllm."]


def conversation(rng, begins_with=None):
    """A conversation of one to six turns as a list of (role, content). `begins_with` makes the first turn."""
    messages = []
    if rng.random() < 0.35:
        messages.append(("system", pick(rng, SYSTEM_PROMPTS)))
    turns = rng.choice([1, 1, 2, 3, 3, 4, 5, 6])
    name = None
    tale = None
    for turn in range(turns):
        roll = rng.random()
        if turn == 0 and begins_with is not None:
            question, answer, tale = begins_with(rng)
        elif tale is not None and rng.random() < 0.7:
            question, answer = after_story_turn(rng, tale)
            if rng.random() < 0.4:
                tale = None
        elif name is not None and rng.random() < 0.35:
            question, answer = pick(rng, ["What is my name?", "Do you know my name?", "Who am I?"]), pick(rng, [f"Your name is {name}.", f"You are {name}."])
        elif turn > 0 and roll < 0.04:
            question, answer = pick(rng, ["What is my name?", "Do you know my name?"]), "You have not told me your name."
            if name is not None:
                answer = f"Your name is {name}."
        elif roll < 0.1:
            name = made_up_name(rng) if rng.random() < 0.75 else rng.choice(GIRLS + BOYS)
            question = pick(rng, [f"My name is {name}.", f"Hello, I am {name}.", f"Hi! My name is {name}.", f"I am {name}. Who are you?"])
            answer = pick(rng, [f"Hello, {name}! Nice to meet you. I am the small demo model of tinyvllm.", f"Nice to meet you, {name}! What would you like to know?"])
        elif roll < 0.38:
            question, answer = concept_turn(rng)
        elif roll < 0.6:
            question, answer = faq_turn(rng)
        elif roll < 0.74:
            question, answer = fact_turn(rng)
        elif roll < 0.82:
            question, answer = unknown_turn(rng)
        elif roll < 0.9:
            question, answer, tale = story_turn(rng)
        else:
            question, answer, tale = opening_turn(rng)
        messages += [("user", as_typed(rng, question)), ("assistant", answer)]
    return messages


def drill(rng):
    """Many short questions in a row: sums and facts need more practice than stories do."""
    messages = []
    for _ in range(rng.randint(6, 14)):
        question, answer = sum_question(rng) if rng.random() < 0.6 else fact_turn(rng)
        messages += [("user", as_typed(rng, question)), ("assistant", answer)]
    return messages


def render_chat(messages):
    """The chat format as text; `CHAT_TEMPLATE` in write_gguf.py writes the same."""
    return BOS + "".join(f"<|{role}|>\n{content}{END}\n" for role, content in messages)


# --------------------------------------------------------------------------------------------------------------
# Plain prose, and the mix of documents
# --------------------------------------------------------------------------------------------------------------


def prose(rng):
    """A few paragraphs that explain the engine, or plain facts one after the other."""
    kind = rng.random()
    if kind < 0.15:
        first = rng.randrange(len(CAPITALS))
        return " ".join("The capital of {} is {}.".format(*CAPITALS[(first + i) % len(CAPITALS)]) for i in range(3))
    if kind < 0.35:
        turns = [fact_turn(rng) if rng.random() < 0.6 else concept_turn(rng) for _ in range(rng.randint(1, 5))]
        return "\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in turns)
    topics = rng.sample(CONCEPTS, rng.randint(1, 4))
    paragraphs = []
    for names, definitions, details, reasons in topics:
        rest = details + reasons
        rng.shuffle(rest)
        paragraphs.append(" ".join([pick(rng, definitions)] + rest[: rng.randint(1, 4)]))
    return "\n\n".join(paragraphs)


def stray_beginning(rng):
    """Something that has nothing to do with the story after it: whatever the prompt is, a story is a good answer."""
    kind = rng.random()
    if kind < 0.4:
        text = unknown_turn(rng)[0]
    elif kind < 0.7:
        text = " ".join(rng.choice(STRAY_WORDS) for _ in range(rng.randint(1, 7)))
    else:
        text = " ".join(made_up_name(rng) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.5:
        text = text.lower()
    return text + rng.choice([". ", "\n\n", ".\n\n", ": ", "? ", "...\n\n", " "])


STRAY_WORDS = """the a my your this that and or but is was are not very in on at with from for I you we they he she it if when how def main print
return class function import let fn void int data file code test dog cat man woman people house car city water light time year way work life hand
school music money game world country night morning summer winter red green big small new old good bad first last one two ten hello dear why
what who yes no please Sir Madam Chapter Title Note Today Tomorrow email number street lorem ipsum dolor sit amet foo bar baz qux ( ) { } = ; - /""".split()


def question_turn(rng):
    """A question that is no beginning of a story; returns (question, answer, None)."""
    roll = rng.random()
    if roll < 0.4:
        return *unknown_turn(rng), None
    if roll < 0.7:
        questions, answers = rng.choice(FAQ)
        return expand(pick(rng, questions), {}, rng), expand(pick(rng, answers), {}, rng, sentence=False), None
    return *fact_turn(rng), None


def document(rng, openings=0.0):
    """One training document, with its special tokens written out. `openings`: share of additional conversations that
    begin with the beginning of a story or, as often as not, with a question, for training that goes on from a model
    that cannot tell the two apart."""
    if openings > 0 and rng.random() < openings:
        return render_chat(conversation(rng, opening_turn if rng.random() < 0.4 else question_turn)) + EOS
    roll = rng.random()
    if roll < 0.52:
        return BOS + story(rng).text() + EOS
    if roll < 0.56:
        return BOS + stray_beginning(rng) + story(rng).text() + EOS
    if roll < 0.92:
        return render_chat(conversation(rng)) + EOS
    if roll < 0.96:
        return render_chat(drill(rng)) + EOS
    return BOS + prose(rng) + EOS


if __name__ == "__main__":
    for seed in range(12):
        print(document(random.Random(seed)), "\n")
