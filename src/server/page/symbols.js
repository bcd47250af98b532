// The meaning of TeX names in formulas: letters, symbols and their kinds, functions, accents, delimiters, styles.
const Symbols = (() => {
  const words = (text) => text.trim().split(/\s+/);

  /** Words, alternately a name and its meaning. */
  function pairs(text) {
    const list = words(text);
    return new Map(list.filter((_, index) => index % 2 === 0).map((name, index) => [name, list[2 * index + 1]]));
  }

  const LETTERS = pairs(`
    alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ varkappa ϰ
    lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ
    chi χ psi ψ omega ω digamma ϝ partial ∂ imath ı jmath ȷ`);

  /** Letters and symbols that are upright and have no space around them. */
  const UPRIGHT = pairs(`
    Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω Alpha Α Beta Β Epsilon Ε Zeta Ζ
    Eta Η Iota Ι Kappa Κ Mu Μ Nu Ν Omicron Ο Rho Ρ Tau Τ Chi Χ
    nabla ∇ infty ∞ hbar ℏ hslash ℏ ell ℓ Re ℜ Im ℑ wp ℘ aleph ℵ beth ℶ gimel ℷ eth ð emptyset ∅ varnothing ∅
    forall ∀ exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ measuredangle ∡ triangle △ triangledown ▽ square □ Box □
    blacksquare ■ blacktriangle ▲ lozenge ◊ Diamond ◇ bigstar ★ checkmark ✓ degree ° ldots … dots … dotsc … hdots … mathellipsis …
    cdots ⋯ dotsb ⋯ dotsm ⋯ dotsi ⋯ vdots ⋮ ddots ⋱ iddots ⋰ prime ′ backprime ‵ flat ♭ natural ♮ sharp ♯ clubsuit ♣
    diamondsuit ♢ heartsuit ♡ spadesuit ♠ complement ∁ mho ℧ Finv Ⅎ S § P ¶ copyright © pounds £ euro € yen ¥ AA Å aa å
    oe œ OE Œ ae æ AE Æ ss ß o ø O Ø % % # # $ $ _ _ & & lq ‘ rq ’`);

  const BINARY = pairs(`
    pm ± mp ∓ plusmn ± times × div ÷ cdot ⋅ cdotp ⋅ centerdot ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ cap ∩ cup ∪ Cap ⋒ Cup ⋓
    uplus ⊎ sqcap ⊓ sqcup ⊔ vee ∨ lor ∨ wedge ∧ land ∧ veebar ⊻ barwedge ⊼ setminus ∖ smallsetminus ∖ wr ≀ oplus ⊕
    ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ boxplus ⊞ boxminus ⊟ boxtimes ⊠ boxdot ⊡ circledast ⊛ circledcirc ⊚ dagger † dag †
    ddagger ‡ ddag ‡ amalg ⨿ ltimes ⋉ rtimes ⋊ diamond ⋄ dotplus ∔ intercal ⊺ bigcirc ◯ bigtriangleup △
    bigtriangledown ▽ triangleleft ◃ triangleright ▹ lhd ⊲ rhd ⊳ unlhd ⊴ unrhd ⊵ curlyvee ⋎ curlywedge ⋏`);

  const RELATIONS = pairs(`
    le ≤ leq ≤ leqslant ⩽ leqq ≦ ge ≥ geq ≥ geqslant ⩾ geqq ≧ ne ≠ neq ≠ lt < gt > ll ≪ gg ≫ lll ⋘ ggg ⋙ nless ≮
    ngtr ≯ nleq ≰ ngeq ≱ lesssim ≲ gtrsim ≳ lessapprox ⪅ gtrapprox ⪆ lessgtr ≶ gtrless ≷ equiv ≡ approx ≈ approxeq ≊
    sim ∼ nsim ≁ simeq ≃ backsim ∽ cong ≅ ncong ≇ propto ∝ varpropto ∝ asymp ≍ doteq ≐ triangleq ≜ coloneqq ≔ coloneq ≔
    eqqcolon ≕ Coloneqq ⩴ prec ≺ succ ≻ preceq ⪯ succeq ⪰ precsim ≾ succsim ≿ in ∈ isin ∈ notin ∉ ni ∋ owns ∋
    subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ nsubseteq ⊈ nsupseteq ⊉ subseteqq ⫅ supseteqq ⫆
    Subset ⋐ Supset ⋑ sqsubset ⊏ sqsupset ⊐ sqsubseteq ⊑ sqsupseteq ⊒ mid ∣ nmid ∤ parallel ∥ nparallel ∦ perp ⟂
    vdash ⊢ dashv ⊣ vDash ⊨ models ⊨ Vdash ⊩ Vvdash ⊪ nvdash ⊬ nvDash ⊭ smile ⌣ frown ⌢ bowtie ⋈ Join ⋈ between ≬
    pitchfork ⋔ trianglelefteq ⊴ trianglerighteq ⊵ vartriangleleft ⊲ vartriangleright ⊳ therefore ∴ because ∵
    to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸
    Leftrightarrow ⇔ iff ⟺ mapsto ↦ longmapsto ⟼ longrightarrow ⟶ longleftarrow ⟵ longleftrightarrow ⟷
    Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺ uparrow ↑ downarrow ↓ updownarrow ↕ Uparrow ⇑ Downarrow ⇓
    Updownarrow ⇕ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ hookrightarrow ↪ hookleftarrow ↩ rightharpoonup ⇀
    rightharpoondown ⇁ leftharpoonup ↼ leftharpoondown ↽ rightleftharpoons ⇌ leftrightharpoons ⇋ rightleftarrows ⇄
    leftrightarrows ⇆ rightrightarrows ⇉ leftleftarrows ⇇ upuparrows ⇈ downdownarrows ⇊ twoheadrightarrow ↠
    twoheadleftarrow ↞ rightarrowtail ↣ leftarrowtail ↢ rightsquigarrow ⇝ leadsto ⇝ leftrightsquigarrow ↭
    nrightarrow ↛ nleftarrow ↚ nRightarrow ⇏ nLeftarrow ⇍ nleftrightarrow ↮ nLeftrightarrow ⇎ dashrightarrow ⇢
    dashleftarrow ⇠ curvearrowright ↷ curvearrowleft ↶ circlearrowright ↻ circlearrowleft ↺ multimap ⊸ upharpoonright ↾
    restriction ↾`);

  const VERTICAL = new Set("↑↓↕⇑⇓⇕");
  const INTEGRALS = pairs("int ∫ iint ∬ iiint ∭ iiiint ⨌ oint ∮ oiint ∯ oiiint ∰ smallint ∫");
  /** Large operators with limits below and above in displayed formulas. */
  const LARGE = pairs(`
    sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀
    biguplus ⨄ bigsqcup ⨆`);

  const OPENING = pairs("{ { lbrace { lbrack [ langle ⟨ lvert | lVert ‖ lfloor ⌊ lceil ⌈ lgroup ⟮ llbracket ⟦");
  const CLOSING = pairs("} } rbrace } rbrack ] rangle ⟩ rvert | rVert ‖ rfloor ⌋ rceil ⌉ rgroup ⟯ rrbracket ⟧");
  const FENCES = pairs("| ‖ Vert ‖ vert | backslash \\");
  /** Delimiters that need no backslash. */
  const PLAIN_DELIMITERS = pairs("( ( ) ) [ [ ] ] | | / / < ⟨ > ⟩");
  PLAIN_DELIMITERS.set(".", "");

  const FUNCTIONS = new Set(words(`
    sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arsinh arcosh artanh
    exp log ln lg lb arg deg dim hom ker sgn tr rank erf`));
  /** Functions with limits below in displayed formulas. */
  const LIMITS = pairs(`
    lim lim max max min min sup sup inf inf limsup lim_sup liminf lim_inf det det gcd gcd lcm lcm Pr Pr argmax arg_max
    argmin arg_min injlim inj_lim projlim proj_lim esssup ess_sup`);
  for (const [name, text] of LIMITS) LIMITS.set(name, text.replace("_", "\u2009"));

  /** Accents above and below, and whether they stretch to the width of their base. */
  const ACCENTS = pairs(`
    hat ^ check ˇ tilde ~ acute ´ grave \` dot ˙ ddot ¨ dddot ⃛ breve ˘ bar ¯ vec → mathring ˚`);
  const WIDE_ABOVE = pairs(`
    widehat ^ widecheck ˇ widetilde ~ overrightarrow → overleftarrow ← overleftrightarrow ↔
    overbrace ⏞ overbracket ⎴ overparen ⏜`);
  const WIDE_BELOW = pairs(`
    underrightarrow → underleftarrow ← underleftrightarrow ↔ underbrace ⏟ underbracket ⎵ underparen ⏝`);
  const LONG_ARROWS = pairs(`
    xrightarrow → xleftarrow ← xleftrightarrow ↔ xRightarrow ⇒ xLeftarrow ⇐ xLeftrightarrow ⇔ xmapsto ↦ xlongequal =
    xhookrightarrow ↪ xhookleftarrow ↩ xrightharpoonup ⇀ xleftharpoonup ↼ xrightleftharpoons ⇌`);

  /** Spaces, in em. */
  const SPACES = new Map([
    [",", 0.1667], ["thinspace", 0.1667], [":", 0.2222], [">", 0.2222], ["medspace", 0.2222], [";", 0.2778],
    ["thickspace", 0.2778], [" ", 0.3333], ["~", 0.3333], ["\n", 0.3333], ["space", 0.3333], ["nobreakspace", 0.3333],
    ["enspace", 0.5], ["enskip", 0.5], ["quad", 1], ["qquad", 2],
  ]);

  const KINDS = [
    ["letter", LETTERS], ["upright", UPRIGHT], ["bin", BINARY], ["rel", RELATIONS], ["integral", INTEGRALS],
    ["large", LARGE], ["open", OPENING], ["close", CLOSING], ["sign", FENCES], ["limits", LIMITS],
  ];
  /** The text and the kind of a command without arguments. */
  const NAMES = new Map(KINDS.flatMap(([kind, table]) => [...table].map(([name, text]) => [name, { text, kind }])));
  for (const name of FUNCTIONS) NAMES.set(name, { text: name, kind: "function" });
  for (const [name, text] of [["neg", "¬"], ["lnot", "¬"], ["surd", "√"]]) NAMES.set(name, { text, kind: "sign" });
  NAMES.set("colon", { text: ":", kind: "punct" });

  /** Characters that stand for themselves. */
  const SIGNS = new Map();
  for (const symbol of NAMES.values()) if (!SIGNS.has(symbol.text)) SIGNS.set(symbol.text, symbol);
  for (const [signs, kind] of [
    ["([", "open"], [")]", "close"], [",;", "punct"], ["=:", "rel"], ["+", "bin"], ["|‖/\\.!?", "sign"],
  ]) {
    for (const text of signs) SIGNS.set(text, { text, kind });
  }
  for (const [sign, text] of [["-", "−"], ["−", "−"], ["*", "∗"], ["·", "⋅"]]) SIGNS.set(sign, { text, kind: "bin" });

  // ---- Letters in other styles

  /** The code points at which the capitals, small letters and digits of a style begin in Unicode. */
  const STYLES = new Map([
    ["bold", [0x1d400, 0x1d41a, 0x1d7ce]], ["italic", [0x1d434, 0x1d44e]], ["bold-italic", [0x1d468, 0x1d482, 0x1d7ce]],
    ["script", [0x1d49c, 0x1d4b6]], ["fraktur", [0x1d504, 0x1d51e]], ["double", [0x1d538, 0x1d552, 0x1d7d8]],
    ["sans", [0x1d5a0, 0x1d5ba, 0x1d7e2]], ["mono", [0x1d670, 0x1d68a, 0x1d7f6]],
  ]);
  /** Letters that were in Unicode before the rest of their style. */
  const OLDER = {
    italic: pairs("h ℎ"),
    script: pairs("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ"),
    fraktur: pairs("C ℭ H ℌ I ℑ R ℜ Z ℨ"),
    double: pairs("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ"),
  };
  const GREEK = "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡϴΣΤΥΦΧΨΩ∇αβγδεζηθικλμνξοπρςστυφχψω∂ϵϑϰϕϱϖ";
  const GREEK_STYLES = new Map([["bold", 0x1d6a8], ["bold-italic", 0x1d71c]]);

  /** A character in a style, or itself if the style lacks it. */
  function styled(character, style) {
    const begins = STYLES.get(style);
    if (!begins) return character;
    const older = OLDER[style]?.get(character);
    if (older) return older;
    const greek = GREEK_STYLES.has(style) ? GREEK.indexOf(character) : -1;
    if (greek >= 0) return String.fromCodePoint(GREEK_STYLES.get(style) + greek);
    const group = [/^[A-Z]$/, /^[a-z]$/, /^\d$/].findIndex((expression) => expression.test(character));
    if (begins[group] === undefined) return character;
    return String.fromCodePoint(begins[group] + character.charCodeAt(0) - "Aa0".charCodeAt(group));
  }

  /** The delimiter of a token; "" for none, undefined if it is not a delimiter. */
  function delimiter(token) {
    if (!token.startsWith("\\")) return PLAIN_DELIMITERS.get(token);
    const name = token.slice(1);
    const isArrow = VERTICAL.has(RELATIONS.get(name));
    return OPENING.get(name) ?? CLOSING.get(name) ?? FENCES.get(name) ?? (isArrow ? RELATIONS.get(name) : undefined);
  }

  return { ACCENTS, LONG_ARROWS, NAMES, SIGNS, SPACES, VERTICAL, WIDE_ABOVE, WIDE_BELOW, delimiter, styled };
})();
